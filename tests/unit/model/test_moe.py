"""A token goes to the experts that the formula names, and ranks' shares of a mixture make up the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from common.checkpoint import MoEConfig
from common.model import MoE, mixture, route

WIDTH = 16
LING = MoEConfig(
    num_experts=16, experts_per_token=4, intermediate_size=12, num_shared_experts=2, num_groups=4, top_groups=2,
    scoring="sigmoid", normalise=True, scaling=2.5, first_dense=1, has_expert_bias=True,
)  # fmt: skip
QWEN = replace(
    LING, scoring="softmax", num_groups=1, top_groups=1, num_shared_experts=0, scaling=1.0, has_expert_bias=False
)


def random_moe(config: MoEConfig, tp_rank: int = 0, tp_size: int = 1) -> MoE:
    """Every rank's is a share of the same mixture."""
    whole, rank = MoE(config, WIDTH, 0, 1), MoE(config, WIDTH, tp_rank, tp_size)
    draw = torch.Generator().manual_seed(5)
    state = {name: torch.randn(value.shape, generator=draw) for name, value in whole.named_parameters()}
    for name, value in rank.named_parameters():
        full = state[name]
        if name.startswith("experts"):
            full = full[rank.first_expert : rank.first_expert + len(value)]
        elif "shared_gate_up" in name:
            full = torch.cat([half.chunk(tp_size)[tp_rank] for half in full.chunk(2)])
        elif "shared_down" in name:
            full = full.chunk(tp_size, dim=1)[tp_rank]
        value.data.copy_(full)
    return rank


def tokens(count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


def chosen_by_hand(x_D: Tensor, moe: Any) -> dict[int, float]:
    config = moe.config
    logits = (moe.router @ x_D).tolist()
    scores = torch.tensor(logits).sigmoid() if config.scoring == "sigmoid" else torch.tensor(logits).softmax(0)
    bias = [0.0] * config.num_experts if moe.expert_bias is None else moe.expert_bias.tolist()
    choice = [score + own for score, own in zip(scores.tolist(), bias, strict=True)]
    size = config.num_experts // config.num_groups
    groups = [range(start, start + size) for start in range(0, config.num_experts, size)]
    groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:2]))
    allowed = [expert for group in groups[: config.top_groups] for expert in group]
    best = sorted(allowed, key=lambda expert: -choice[expert])[: config.experts_per_token]
    total = sum(scores[expert].item() for expert in best)
    return {expert: scores[expert].item() / total * config.scaling for expert in best}


@pytest.mark.parametrize("config", [LING, QWEN], ids=["sigmoid in groups", "softmax"])
def test_a_token_goes_to_the_experts_of_the_formula(config: MoEConfig) -> None:
    moe, x_TD = random_moe(config), tokens(20)
    expert_TC, weight_TC = route(x_TD, moe)
    mixed_TD = mixture(x_TD, moe)
    for token, x_D in enumerate(x_TD):
        expected = chosen_by_hand(x_D, moe)
        assert dict(zip(expert_TC[token].tolist(), weight_TC[token].tolist(), strict=True)) == pytest.approx(
            expected, rel=1e-4
        )
        result_D = sum(weight * of_expert(x_D, moe, expert) for expert, weight in expected.items())
        torch.testing.assert_close(mixed_TD[token], result_D + shared(x_D, moe), rtol=1e-4, atol=1e-3)


def of_expert(x_D: Tensor, moe: Any, expert: int) -> Tensor:
    gate, up = (moe.experts_gate_up[expert] @ x_D).chunk(2)
    return moe.experts_down[expert] @ (functional.silu(gate) * up)


def shared(x_D: Tensor, moe: Any) -> Tensor:
    if moe.shared_gate_up_proj is None:
        return torch.zeros(WIDTH)
    gate, up = (moe.shared_gate_up_proj.weight @ x_D).chunk(2)
    return moe.shared_down_proj.weight @ (functional.silu(gate) * up)


def test_equal_scores_go_to_the_first_experts() -> None:
    moe = random_moe(replace(LING, has_expert_bias=False))
    moe.router.data.zero_()
    assert route(tokens(3), moe).expert_TC.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("config", [LING, QWEN], ids=["sigmoid in groups", "softmax"])
def test_ranks_sum_to_the_whole(config: MoEConfig) -> None:
    x_TD = tokens(9)
    shares = [mixture(x_TD, random_moe(config, rank, 4)) for rank in range(4)]
    torch.testing.assert_close(sum(shares), mixture(x_TD, random_moe(config)), rtol=1e-4, atol=1e-3)


BY_BLOCK = replace(LING, num_groups=1, top_groups=1, capacity=6, block_size=8)


def test_the_tokens_of_a_block_choose_among_the_experts_that_it_admits() -> None:
    """Scores of a block are the largest of its tokens; the bias decides and does not weigh; a last block is shorter."""
    moe, x_TD = random_moe(BY_BLOCK), tokens(21)
    assert moe.expert_bias is not None
    moe.router.data[3], moe.expert_bias.data[3] = moe.router.data[2], moe.expert_bias.data[2]  # ties: the lower id
    expert_TC, weight_TC = route(x_TD, moe)
    scores_TE = functional.linear(x_TD, moe.router).sigmoid()
    choice_TE = scores_TE + moe.expert_bias
    unlike = 0
    for start in range(0, len(x_TD), 8):
        of_block = choice_TE[start : start + 8].amax(0).tolist()
        admitted = sorted(range(16), key=lambda expert, scores=of_block: (-scores[expert], expert))[:6]  # type: ignore[misc]
        for token in range(start, min(start + 8, len(x_TD))):
            best = sorted(admitted, key=lambda expert, at=token: (-float(choice_TE[at, expert]), expert))[:4]  # type: ignore[misc]
            assert expert_TC[token].tolist() == best
            weight = scores_TE[token, best] / scores_TE[token, best].sum() * 2.5
            torch.testing.assert_close(weight_TC[token], weight)
            unlike += best != choice_TE[token].sort(descending=True, stable=True).indices[:4].tolist()
    assert unlike, "blocks decide something here"


def test_a_block_chooses_by_its_own_tokens_alone() -> None:
    moe, x_TD = random_moe(BY_BLOCK), tokens(24)
    changed_TD = x_TD.clone()
    changed_TD[8:16] += 1
    expert_TC, changed_TC = route(x_TD, moe).expert_TC, route(changed_TD, moe).expert_TC
    assert torch.equal(expert_TC[:8], changed_TC[:8]) and torch.equal(expert_TC[16:], changed_TC[16:])
    assert not torch.equal(expert_TC[8:16], changed_TC[8:16])
