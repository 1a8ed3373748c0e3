"""What a step hides and who sees whom: two complementary noised copies of a row beside its clean copy.

Shape letters: B rows, S positions of a row, C copies, T = C * S positions of a pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from .model import View, view_of
from .recipe import BLOCK, BlockRecipe

NOISED = 2  # copies whose masks complement each other; the clean copy comes after them
COPIES = NOISED + 1
END_BLOCKS = 2  # blocks after the one that holds the EOS in which EOS is still learnt
END_WEIGHT = 0.1


class BlockBatch(NamedTuple):
    """Inputs are [B, T]: the noised copies, then the clean one. Targets and weights are those of the noised ones."""

    inputs_BT: torch.Tensor
    targets_BN: torch.Tensor
    weight_BN: torch.Tensor


def is_visible(query_T: torch.Tensor, key_T: torch.Tensor, length: int) -> torch.Tensor:
    """Whether a place of a pass sees another: the clean blocks before its own, and its own block in its own copy."""
    query_copy, key_copy = query_T // length, key_T // length
    query_block, key_block = query_T % length // BLOCK, key_T % length // BLOCK
    is_earlier = (key_copy == NOISED) & (key_block < query_block)
    return is_earlier | ((key_copy == query_copy) & (key_block == query_block))


def training_view(length: int, recipe: BlockRecipe, device: torch.device, is_flex: bool) -> View:
    """Positions and attention of rows of `length` tokens, copied; the same for every row."""
    place_T = torch.arange(COPIES * length, device=device)
    mask: torch.Tensor | BlockMask = is_visible(place_T[:, None], place_T, length)
    if is_flex:
        mask = create_block_mask(
            lambda _b, _h, q, kv: is_visible(q, kv, length), None, None, len(place_T), len(place_T), device=str(device)
        )
    return view_of(place_T % length, recipe, mask)


def complementary_masks(rows: int, length: int, full_share: float, device: torch.device) -> torch.Tensor:
    """[B, C, S]: each block hides a share that is uniform in [0, 1] in one copy, and the rest in the other.

    In `full_share` of the blocks of a copy everything is hidden, as in the first pass over a block.
    """
    blocks = (rows, NOISED, length // BLOCK)
    share_BS = torch.rand(rows, length // BLOCK, device=device).repeat_interleave(BLOCK, dim=1)
    is_first_BS = torch.rand(rows, length, device=device) < share_BS
    is_full_BCS = (torch.rand(blocks, device=device) < full_share).repeat_interleave(BLOCK, dim=2)
    return torch.stack((is_first_BS, ~is_first_BS), dim=1) | is_full_BCS


def add_block_noise(
    tokens_BS: torch.Tensor, prompt_length: torch.Tensor, answer_length: torch.Tensor, mask_id: int, full_share: float
) -> BlockBatch:
    """Lengths are [B, 1]; `tokens_BS` is prompt, answer and EOS up to the end. The prompt is never hidden."""
    rows, length = tokens_BS.shape
    place_S = torch.arange(length, device=tokens_BS.device)
    end = prompt_length + answer_length  # the first EOS
    weight_BS = torch.where(place_S > end, END_WEIGHT, 1.0)
    weight_BS = weight_BS.masked_fill(place_S // BLOCK > end // BLOCK + END_BLOCKS, 0.0)
    is_masked_BCS = complementary_masks(rows, length, full_share, tokens_BS.device)
    is_masked_BCS &= (place_S >= prompt_length)[:, None]
    noised_BCS = tokens_BS[:, None].masked_fill(is_masked_BCS, mask_id)
    return BlockBatch(
        torch.cat((noised_BCS.flatten(1), tokens_BS), dim=1),
        tokens_BS.repeat(1, NOISED),
        (weight_BS[:, None] * is_masked_BCS).flatten(1),
    )
