"""A step's sizes, tiles and handover: what is captured, which tile holds a query, what the layers leave the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from common.checkpoint import ModelConfig, load_model_config
from common.model import Activation
from lopa_cuda.assemble import MOST_CAPTURED_BYTES, MOST_CAPTURED_TOKENS, most_captured_tokens
from lopa_cuda.steps import RECORD, CacheSizes, Handover, Tiling, write_tiles
from quant.w8a8 import QuantizedActivation, quantize_per_token


def most_tokens(config: ModelConfig, tp_size: int) -> int:
    kv_heads = config.kv_heads_of_rank(tp_size)
    sizes = CacheSizes(config.num_layers, 1, 1, kv_heads, config.head_size, torch.bfloat16)
    return most_captured_tokens(config, tp_size, sizes.bytes_per_position)


def held_bytes(model: str, num_tokens: int, tp_size: int) -> int:
    """Return the bytes of staged keys and values, and of gate and up, in bf16, of a model without experts."""
    config = load_model_config(model)
    kv = 2 * config.num_layers * config.kv_heads_of_rank(tp_size) * config.head_size
    return 2 * num_tokens * (kv + 2 * config.intermediate_size // tp_size)


def test_a_small_model_is_captured_up_to_the_most_tokens() -> None:
    assert most_tokens(load_model_config("models/demo"), 1) == MOST_CAPTURED_TOKENS


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_large_model_is_bound_by_memory(tp_size: int) -> None:
    model = "configs/models/llada_8b"
    num_tokens = most_tokens(load_model_config(model), tp_size)
    assert num_tokens < MOST_CAPTURED_TOKENS
    assert held_bytes(model, num_tokens, tp_size) <= MOST_CAPTURED_BYTES < held_bytes(model, num_tokens + 1, tp_size)


def test_routed_experts_count_as_often_as_a_token_goes_through_one() -> None:
    config = load_model_config("configs/models/llada2_flash")
    assert config.moe is not None
    twice = replace(config, moe=replace(config.moe, experts_per_token=2 * config.moe.experts_per_token))
    assert most_tokens(twice, 1) < most_tokens(config, 1)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("model", ["llada2_flash", "sdar_30b_a3b"])
def test_every_rank_has_room_for_the_results_of_all_experts(model: str, tp_size: int) -> None:
    config = load_model_config(f"configs/models/{model}")
    assert config.moe is not None
    kv = 2 * config.num_layers * config.kv_heads_of_rank(tp_size) * config.head_size
    results = config.moe.experts_per_token * config.hidden_size
    assert 2 * most_tokens(config, tp_size) * (kv + results) <= MOST_CAPTURED_BYTES


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("queries", [16, 64])
def test_every_query_is_in_one_tile(seed: int, queries: int) -> None:
    rng = np.random.default_rng(seed)
    tiling = Tiling(int(rng.integers(1, 9)), queries)
    num_rows, num_padding = int(rng.integers(1, 20)), int(rng.choice([0, 1, 300]))
    num_entries, start, slot = (
        rng.integers(1, 200, num_rows),
        rng.integers(0, 900, num_rows),
        rng.integers(0, 4, num_rows),
    )
    spans = np.stack((num_entries.cumsum() - num_entries, num_entries, num_entries, start, start, slot))
    num_tokens = int(num_entries.sum()) + num_padding
    needed = tiling.needed(num_entries, num_tokens)
    table = np.full((needed + 3, RECORD), -1, dtype=np.int32)
    write_tiles(table, tiling, spans, num_tokens)
    assert (table[:needed, 1] > 0).all() and not table[needed:].any()
    records = [*spans.T.tolist(), [num_tokens - num_padding, num_padding, 1, 0, 0, 0]]
    seen = np.zeros((num_tokens, tiling.group), dtype=int)
    for *record, first_query, first_key in table[:needed].tolist():
        assert record in records and first_key == record[0]
        query = np.arange(first_query, min(first_query + queries, tiling.group * record[1]))
        seen[record[0] + query // tiling.group, query % tiling.group] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("group", [1, 2, 4, 7])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 60])
def test_rows_of_whole_blocks_fit_the_room_of_their_bucket(num_rows: int, group: int) -> None:
    tiling = Tiling(group, 64)
    for blocks in range(1, 9):
        num_entries = np.full(num_rows, 32 * blocks)
        assert tiling.needed(num_entries, num_rows * 32 * blocks) <= tiling.room(num_rows * 32 * blocks)


MOST = 8


def copy_rows(parts: list[Tensor], to: list[Tensor], index_M: Tensor | None = None) -> None:
    for part, other in zip(parts, to, strict=True):
        other.copy_(part if index_M is None else part[index_M])


def same(x: Activation) -> Activation:
    return x


@pytest.mark.parametrize("kind", [same, quantize_per_token])
def test_a_captured_pass_leaves_its_values_where_the_next_one_does(kind: Callable[[Tensor], Activation]) -> None:
    handover = Handover(copy_rows, MOST)
    index = torch.tensor([2, 0, 0])
    for num_tokens in (MOST, 5):
        attended, residual = torch.randn(num_tokens, 6), torch.randn(num_tokens, 4)
        handover.leave(kind(attended), residual, is_captured=True)
        for is_captured in (True, False):  # also a head that is not captured takes them from there
            taken, taken_residual = handover.take(index, is_captured=is_captured)
            assert torch.equal(taken_residual, residual[index])
            for part, whole in zip(parts_of(taken), parts_of(kind(attended)), strict=True):
                assert torch.equal(part, whole[index])


def test_a_pass_that_is_not_captured_leaves_its_own() -> None:
    handover = Handover(copy_rows, MOST)
    kept, other = torch.randn(5, 4), torch.randn(3 * MOST, 4)
    handover.leave(kept, kept, is_captured=True)
    handover.leave(other, other, is_captured=False)
    last = torch.tensor([len(other) - 1])
    assert torch.equal(handover.take(last, is_captured=False)[1], other[last])
    handover.use_captured()
    assert torch.equal(handover.take(last - last, is_captured=False)[1], kept[:1])


def parts_of(activation: Activation) -> tuple[Tensor, ...]:
    return tuple(activation) if isinstance(activation, QuantizedActivation) else (activation,)
