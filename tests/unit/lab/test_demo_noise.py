"""What the demo training hides and who sees whom."""

from __future__ import annotations

import torch
from demo_problems import CANVAS_TOKENS
from demo_training.noise import BEHIND_CANVAS, Batch, add_noise, block_ids, causal_horizon
from demo_training.recipe import SEQUENCE

BLOCK = block_ids(torch.arange(SEQUENCE)[None] - 20, torch.tensor([[16]]))


def test_the_prompt_is_block_zero_and_padding_lies_behind() -> None:
    assert BLOCK[0, :20].eq(0).all() and BLOCK[0, 20:36].eq(1).all() and BLOCK[0, 211] == 12
    assert BLOCK[0, 212:].eq(BEHIND_CANVAS).all()


def test_block_causal_rows_see_up_to_their_own_block() -> None:
    assert torch.equal(causal_horizon(BLOCK, torch.tensor([[False]])), BLOCK)


def test_shifted_boundary_lets_only_last_rows_see_the_next_block() -> None:
    ahead = causal_horizon(BLOCK, torch.tensor([[True]])) - BLOCK
    assert ahead[0].nonzero().flatten().tolist() == [19 + 16 * i for i in range(12)]
    assert ahead.max() == 1


def noisy(rows: int = 512) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    prompt = torch.randint(20, 97, (rows, 1))
    answer = torch.randint(20, 190, (rows, 1))
    return add_noise(torch.zeros(rows, SEQUENCE).long(), prompt, answer, mask_id=1), prompt, answer


def test_noise_leaves_the_prompt_and_weighs_only_visible_masks() -> None:
    batch, prompt, answer = noisy()
    offset = torch.arange(SEQUENCE) - prompt
    assert not batch.inputs_BS[(offset < 0) | (offset >= CANVAS_TOKENS)].any()
    assert batch.inputs_BS[batch.weight_BS > 0].eq(1).all()
    assert batch.weight_BS[offset > answer].max() <= 0.1
    predicting = batch.horizon_BS[:, :-1][batch.weight_BS[:, 1:] > 0]
    assert (predicting >= 0).all() and (batch.weight_BS.sum(dim=1) > 0).float().mean() > 0.95


def test_mask_ratios_rise_over_the_blocks() -> None:
    batch, prompt, _ = noisy(4096)
    offset = torch.arange(SEQUENCE) - prompt
    early = batch.inputs_BS[(offset >= 0) & (offset < 32)].float().mean()
    late = batch.inputs_BS[(offset >= 96) & (offset < 128)].float().mean()
    assert early < 0.5 < late


def test_no_row_sees_padding_and_every_row_sees_the_prompt() -> None:
    batch, _, _ = noisy()
    assert batch.horizon_BS.max() < BEHIND_CANVAS
    assert batch.horizon_BS.min() >= 0
