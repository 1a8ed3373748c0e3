"""What only some families have, in Triton's interpreter: norms of heads, partial rotation, experts, groups of heads.

The cases run in the process that test_kernels_interpreter.py starts.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from common.checkpoint import MoEConfig
from common.model import MoE, QKNorm, Routing, mixture, rms_norm, rotary_table, rotate
from common.model import route as plain_route
from quant.experts import swap_experts
from quant.scheme import Scheme
from tests.unit.lopa_cuda.operands import random, relative_error

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in the process of test_kernels_interpreter.py")
if IS_INTERPRETED:
    from lopa_cuda import kernels
    from lopa_cuda.kernels.experts import block_tokens
    from lopa_cuda.kernels.route import deal

TOLERANCE = 2e-2
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 16
LING = MoEConfig(
    num_experts=12, experts_per_token=4, intermediate_size=32, num_shared_experts=1, num_groups=4, top_groups=2,
    scoring="sigmoid", normalise=True, scaling=2.5, first_dense=1, has_expert_bias=True,
)  # fmt: skip
QWEN = replace(LING, scoring="softmax", num_experts=16, num_groups=1, top_groups=1, num_shared_experts=0, scaling=1.0,
    has_expert_bias=False, experts_per_token=3, intermediate_size=48)  # fmt: skip
BY_BLOCK = replace(LING, num_groups=1, top_groups=1, capacity=6, block_size=4)
WIDE = replace(BY_BLOCK, num_experts=48, capacity=20, block_size=16, experts_per_token=8)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("rotary_size", [HEAD_SIZE, HEAD_SIZE // 2, 12])
def test_heads_are_normed_and_rotated_in_part(rotary_size: int, has_norm: bool) -> None:
    num_tokens, num_rotated = 7, NUM_HEADS + NUM_KV_HEADS
    qkv = random(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE)
    norm = QKNorm(HEAD_SIZE, 1e-6) if has_norm else None
    position, table = torch.randint(0, 50, (num_tokens,)), rotary_table(50, rotary_size, 1e6, torch.device("cpu"))
    window = torch.full((2, num_tokens + 1, NUM_KV_HEADS, HEAD_SIZE), 7.0).bfloat16()
    heads = qkv.view(num_tokens, -1, HEAD_SIZE)
    q, k, v = heads[:, :NUM_HEADS], heads[:, NUM_HEADS:num_rotated], heads[:, num_rotated:]
    if norm is not None:
        norm.q_weight.data, norm.k_weight.data = random(HEAD_SIZE), random(HEAD_SIZE)
        q, k = rms_norm(q, norm.q_weight, norm.eps), rms_norm(k, norm.k_weight, norm.eps)
    query = kernels.rope_prewrite(qkv, position, table, window, num_heads=NUM_HEADS, qk_norm=norm)
    assert relative_error(query, rotate(q, table[position])) < TOLERANCE
    assert relative_error(window[0, :num_tokens], rotate(k, table[position])) < TOLERANCE
    assert torch.equal(window[1, :num_tokens], v) and bool((window[:, num_tokens:] == 7).all())


def random_moe(config: MoEConfig, width: int, tp_rank: int = 0, tp_size: int = 1) -> MoE:
    moe = MoE(config, width, tp_rank, tp_size)
    for name, parameter in moe.named_parameters():
        parameter.data = torch.randn(parameter.shape) * 0.3
        if name.startswith("experts"):
            parameter.data = parameter.data.bfloat16()
    return moe


def mixed_experts(x: torch.Tensor, routing: Routing, moe: MoE, shared: torch.Tensor | None = None) -> torch.Tensor:
    return kernels.mix_experts(kernels.expert_input(x, moe), routing, kernels.deal_pairs(routing, moe), moe, shared)


@pytest.mark.parametrize(("num_tokens", "width"), [(9, 32), (16, 200), (70, 200)])
@pytest.mark.parametrize("config", [LING, QWEN, BY_BLOCK, WIDE], ids=["groups", "softmax", "blocks", "more experts"])
def test_routing_is_the_plain_one(config: MoEConfig, num_tokens: int, width: int) -> None:
    moe, x = random_moe(config, width), random(num_tokens, width)
    moe.router.data[1] = moe.router.data[0]  # a tie, which goes to the lower id
    if moe.expert_bias is not None:
        moe.expert_bias.data[1] = moe.expert_bias.data[0]
    expected = plain_route(x, moe)
    expert, weight = kernels.route(kernels.router_logits(x, moe.router), moe.expert_bias, config)
    assert torch.equal(expert.long(), expected.expert_TC)
    torch.testing.assert_close(weight, expected.weight_TC, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 400])
def test_pairs_are_dealt_to_their_experts_in_order(num_tokens: int) -> None:
    """Covers several blocks, and experts of other ranks. Every pair is in one tile."""
    expert = torch.rand(num_tokens, 8).argsort(1)[:, :3].int()
    dealt, tile = deal(expert, 2, 4, 16), 16
    pairs = [(expert.flatten() == 2 + number).nonzero()[:, 0] for number in range(4)]
    place = 0
    for own in pairs:
        assert torch.equal(dealt.order_P[place : place + len(own)].long(), own)
        place += len(own)
    expected = [number for number, own in enumerate(pairs) for _ in range(-(-len(own) // tile))]
    is_full = dealt.first_L < dealt.end_L
    assert dealt.expert_L[is_full].tolist() == expected
    ends = torch.tensor([len(own) for own in pairs]).cumsum(0)
    starts = [range(end - len(own), end, tile) for own, end in zip(pairs, ends.tolist(), strict=True)]
    assert dealt.first_L[is_full].tolist() == [first for some in starts for first in some]
    assert torch.equal(dealt.end_L[is_full].long(), ends[expected])


@pytest.mark.parametrize("counts", [[3, 1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2], [0, 0, 9], [9, 0, 0], [1, 4, 1, 3, 0]])
def test_there_are_tiles_enough_for_any_deal(counts: list[int]) -> None:
    expert = torch.cat([torch.full((count,), number) for number, count in enumerate(counts)]).int()
    dealt = deal(expert[torch.randperm(len(expert))].reshape(-1, 1), 0, len(counts), 2)
    is_full = dealt.first_L < dealt.end_L
    assert dealt.expert_L[is_full].bincount(minlength=len(counts)).tolist() == [-(-count // 2) for count in counts]


@pytest.mark.parametrize(("num_tokens", "tp_size"), [(1, 1), (22, 1), (5, 2)])
@pytest.mark.parametrize("config", [LING, QWEN], ids=["sigmoid in groups", "softmax"])
def test_experts_mix_as_the_plain_version(config: MoEConfig, num_tokens: int, tp_size: int) -> None:
    """Most of 22 tokens are alike, so their experts get more than a tile of them."""
    moe, x = random_moe(replace(config, num_shared_experts=0), 32, tp_size - 1, tp_size), random(num_tokens, 32)
    x[3:] = x[-1]
    shared = random(num_tokens, 32) if config.num_shared_experts else None
    routing = kernels.route(kernels.router_logits(x, moe.router), moe.expert_bias, config)
    mixed = mixed_experts(x, routing, moe, shared)
    expected = mixture(x, moe) if shared is None else mixture(x, moe) + shared
    assert relative_error(mixed, expected) < TOLERANCE


@pytest.mark.parametrize("scheme", ["w8a8_dynamic", "fp8"])
@pytest.mark.parametrize(("num_tokens", "tp_size"), [(5, 1), (37, 2)])
def test_experts_in_8_bits_mix_as_the_plain_version(num_tokens: int, tp_size: int, scheme: Scheme) -> None:
    """Scales of channels span two orders, so that one read at a wrong place shows; most tokens are alike, so that
    their experts have more than a tile of them."""
    config = replace(LING, num_shared_experts=0, intermediate_size=96)
    moe, x = random_moe(config, 64, tp_size - 1, tp_size), random(num_tokens, 64)
    for weight in (moe.experts_gate_up, moe.experts_down):
        weight.data *= torch.logspace(-1, 1, weight.shape[1])[:, None].bfloat16()
    x[3:] = 4 * x[-1]
    swap_experts(moe, scheme)
    routing = kernels.route(kernels.router_logits(x, moe.router), moe.expert_bias, config)
    tolerance = TOLERANCE if scheme == "w8a8_dynamic" else 0.15  # the interpreter rounds to float8 in its own way
    assert relative_error(mixed_experts(x, routing, moe), mixture(x, moe)) < tolerance


def test_tiles_hold_what_an_expert_gets() -> None:
    mini = replace(LING, num_experts=256, experts_per_token=8)
    assert [block_tokens(count, mini) for count in (1, 256, 257, 512, 1024, 2**15)] == [16, 16, 32, 32, 64, 64]
