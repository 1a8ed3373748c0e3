"""The demo model in training applies the attention rule, whichever kernel computes it."""

from __future__ import annotations

import torch
from demo_training.model import Dream
from demo_training.noise import add_noise
from demo_training.recipe import SEQUENCE, TINY
from demo_training.training import Trainer, dream_loss, random_batch


def test_both_attention_kernels_apply_one_rule() -> None:
    torch.manual_seed(0)
    prompt, answer = torch.tensor([[20], [51], [96]]), torch.tensor([[20], [189], [100]])
    batch = add_noise(torch.zeros(3, SEQUENCE).long(), prompt, answer, mask_id=1)
    model = Dream(TINY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        plain, flex = (model(batch.inputs_BS, batch.block_BS, batch.horizon_BS, is_flex) for is_flex in (False, True))
    torch.testing.assert_close(plain, flex, rtol=1e-3, atol=1e-3)


def test_no_row_feels_a_key_beyond_its_horizon() -> None:
    torch.manual_seed(0)
    model = Dream(TINY)
    block_BS = torch.arange(SEQUENCE)[None].div(32, rounding_mode="floor").int()
    tokens_BS = torch.randint(TINY.vocabulary, (1, SEQUENCE))
    changed_BS = torch.where(block_BS > 3, (tokens_BS + 1) % TINY.vocabulary, tokens_BS)
    with torch.no_grad():
        before, after = (model(tokens, block_BS, block_BS) for tokens in (tokens_BS, changed_BS))
    assert torch.equal(before[:, :128], after[:, :128])
    assert not torch.equal(before[:, 128:], after[:, 128:])


def test_a_machine_too_busy_for_its_time_trains_one_step_all_the_same() -> None:
    saved: list[Dream] = []
    said: list[str] = []
    cpu = torch.device("cpu")
    model, batch = Dream(TINY), random_batch(TINY, cpu)
    trainer = Trainer(TINY, model, dream_loss(cpu), batch, "sdpa", said.append)
    trainer.run(iter([batch, batch]), 1e-9, lambda: saved.append(model))
    assert saved == [model] and said[-1].startswith("trained 1 steps, last loss ")
