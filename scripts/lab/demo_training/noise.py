"""What a batch hides and who sees whom: windows of blocks, mask ratios, attention horizons, loss weights.

Works on whole tensors where they lie. Shape letters: B samples, S positions of a sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from demo_problems import CANVAS_TOKENS

BLOCK_SIZES = (8, 16, 32)
MAX_BLOCKS = CANVAS_TOKENS // min(BLOCK_SIZES)
BEHIND_CANVAS = 10_000  # block id of padding: beyond every horizon


class Batch(NamedTuple):
    """A row sees a key where `block[key] <= horizon[row]`: the whole attention rule. The prompt is block 0."""

    inputs_BS: torch.Tensor
    targets_BS: torch.Tensor
    block_BS: torch.Tensor
    horizon_BS: torch.Tensor
    weight_BS: torch.Tensor


class Draws(NamedTuple):
    """Per-sample choices, [B, 1] each."""

    block_size: torch.Tensor
    num_blocks: torch.Tensor
    eos_block: torch.Tensor
    first_active: torch.Tensor
    last_active: torch.Tensor
    is_whole: torch.Tensor
    window_end: torch.Tensor


def block_ids(offset_BS: torch.Tensor, block_size: torch.Tensor) -> torch.Tensor:
    block = offset_BS.div(block_size, rounding_mode="floor") + 1
    block = torch.where(offset_BS < CANVAS_TOKENS, block, BEHIND_CANVAS)
    return block.clamp(min=0).masked_fill(offset_BS < 0, 0).int()


def chance(like: torch.Tensor, probability: float) -> torch.Tensor:
    return torch.rand(like.shape, device=like.device) < probability


def below(limit: torch.Tensor) -> torch.Tensor:
    """Random integers in [0, limit)."""
    return (torch.rand(limit.shape, device=limit.device) * limit).long().minimum(limit - 1)


def draw_windows(answer_length: torch.Tensor) -> Draws:
    """60%: clean blocks, then 1 to 4 active ones, then masks. 40%: every block up to the EOS or the canvas's end."""
    one = torch.ones_like(answer_length)
    small, middle, large = BLOCK_SIZES
    size = torch.where(chance(one, 0.1), small, torch.where(chance(one, 0.5), middle, large))
    num_blocks = CANVAS_TOKENS // size
    eos_block = answer_length // size + 1
    is_whole = chance(one, 0.4)
    first = torch.where(is_whole, one, 1 + below(eos_block))
    last = torch.where(chance(one, 0.5), num_blocks, eos_block)
    last = torch.where(is_whole, last, (first + below(4 * one)).minimum(num_blocks))
    end = (last + below(2 * one)).minimum(num_blocks)
    end = torch.where(chance(one, 0.15) | (is_whole & chance(one, 0.5)), num_blocks, end)
    return Draws(size, num_blocks, eos_block, first, last, is_whole, end)


def mask_ratio(block_BS: torch.Tensor, d: Draws) -> torch.Tensor:
    """Ascending ratios over the active blocks, as when decoding runs ahead in several blocks at once."""
    count = d.last_active - d.first_active + 1
    # Stretched beyond 1: a block that was just opened is all masks.
    ratio = torch.rand(len(count), MAX_BLOCKS, device=count.device) * 1.15
    ratio = ratio.masked_fill(torch.arange(MAX_BLOCKS, device=count.device) >= count, 2.0).sort(dim=1).values
    is_uniform = d.is_whole & chance(count, 0.25)
    ratio = torch.where(is_uniform, torch.rand_like(ratio[:, :1]), ratio)
    ratio_BS = ratio.gather(1, (block_BS - d.first_active).clamp(0, MAX_BLOCKS - 1))
    ratio_BS = ratio_BS.masked_fill(block_BS < d.first_active, 0.0)
    return torch.where((block_BS > d.last_active) & ~is_uniform, 1.0, ratio_BS)


def causal_horizon(block_BS: torch.Tensor, is_shifted: torch.Tensor) -> torch.Tensor:
    """A block sees what is before it and itself. Shifted: a block's last row predicts the next block, so sees it."""
    following = F.pad(block_BS[:, 1:], (0, 1), value=BEHIND_CANVAS)
    is_last = (following > block_BS) & (following < BEHIND_CANVAS)
    return block_BS + (is_shifted & is_last).int()


def window_horizon(block_BS: torch.Tensor, d: Draws) -> torch.Tensor:
    """Full attention up to the window's end; in half of the samples the clean blocks see less, as if cached earlier."""
    end_BS = d.window_end.expand_as(block_BS).int()
    reach = torch.arange(MAX_BLOCKS + 1, device=block_BS.device) + torch.randint_like(block_BS[:, : MAX_BLOCKS + 1], 4)
    reach[:, 0] = torch.randint_like(reach[:, 0], 2)
    reach = reach.cummax(dim=1).values
    cached_BS = reach.gather(1, block_BS.clamp(max=MAX_BLOCKS).long()).int().minimum(end_BS)
    is_clean = block_BS < d.first_active
    following = F.pad(block_BS[:, 1:], (0, 1), value=BEHIND_CANVAS)
    is_shift_row = is_clean & (following == d.first_active) & chance(d.first_active, 0.5)
    use_cached = is_clean & chance(d.first_active, 0.5) & ~is_shift_row
    return torch.where(use_cached, cached_BS, end_BS)


def loss_weight(offset_BS: torch.Tensor, block_BS: torch.Tensor, answer_length: torch.Tensor, d: Draws) -> torch.Tensor:
    """EOS padding counts little; blocks far after the EOS only where the whole canvas is in play."""
    weight = torch.where(offset_BS > answer_length, 0.1, 1.0)
    is_far = block_BS > d.eos_block + 2
    weight = torch.where(is_far, torch.where(d.is_whole, 0.02, 0.0), weight)
    limit = torch.where(d.is_whole, d.num_blocks, d.last_active + 1)
    return weight.masked_fill((offset_BS < 0) | (block_BS > limit), 0.0)


def add_noise(tokens_BS: torch.Tensor, prompt_length: torch.Tensor, answer_length: torch.Tensor, mask_id: int) -> Batch:
    """Lengths are [B, 1]; `tokens_BS` is prompt, answer and EOS up to the end."""
    d = draw_windows(answer_length)
    offset_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) - prompt_length
    block_BS = block_ids(offset_BS, d.block_size)
    in_canvas = (block_BS > 0) & (block_BS < BEHIND_CANVAS)
    is_masked = (torch.rand(tokens_BS.shape, device=tokens_BS.device) < mask_ratio(block_BS, d)) & in_canvas
    is_causal = chance(answer_length, 0.35)
    horizon_BS = torch.where(
        is_causal, causal_horizon(block_BS, chance(answer_length, 0.5)), window_horizon(block_BS, d)
    )
    weight_BS = loss_weight(offset_BS, block_BS, answer_length, d) * is_masked
    weight_BS = weight_BS.masked_fill(~is_causal & (block_BS > d.window_end), 0.0)
    # Padding rows must see something, or their softmax is not a number.
    horizon_BS = torch.where(block_BS == BEHIND_CANVAS, 0, horizon_BS)
    return Batch(tokens_BS.masked_fill(is_masked, mask_id), tokens_BS, block_BS, horizon_BS.int(), weight_BS)
