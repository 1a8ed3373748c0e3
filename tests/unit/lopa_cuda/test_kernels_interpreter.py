"""The Triton kernels on tiny shapes through Triton's interpreter: indexing, masks and merges, where no GPU is at hand.

Triton interprets or compiles for a whole process, decided when it is first imported, so the cases run in a process of
their own that the last test starts. The interpreter truncates where a GPU rounds to bf16, hence the tolerance;
tests/device checks the arithmetic.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from started import interpreted_by_triton
from torch import Tensor

from common.config import MIN_TEMPERATURE
from common.decoding import RowField, Sampling, StepPlan
from common.model import (
    Gather,
    SamplingRows,
    add_rms_norm,
    merge_statistics,
    rotary_table,
    rotate,
    sampled_statistics,
    sampling_fields,
    shard_statistics,
    swiglu,
)
from common.runtime import Tiles, class_statistics, pages_for
from common.runtime.classes import tiles as plain_tiles
from lopa_cuda.ops.plain import visible_keys
from lopa_cuda.steps import PAGE_SIZE, RECORD, Run, Share, Tiling, cut, deal, write_tiles
from lopa_cuda.tiles import LinearConfig
from quant import fp8, w8a8
from quant.w8a8 import QuantizedActivation
from tests.exchange import on_ranks
from tests.unit.lopa_cuda.operands import random, relative_error

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = 2e-2
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 16
# temperature, top_p, top_k
SAMPLED_ROWS = [
    (0, 1, 0), (1e-3, 1, 0), (0.05, 0.9, 0), (0.3, 1, 0), (0.7, 1, 5), (1.0, 0.5, 7), (1.5, 0.9, 0), (2.0, 1, 0),
]  # fmt: skip
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in test_in_the_interpreter's process")
if IS_INTERPRETED:
    from lopa_cuda import kernels
    from lopa_cuda.kernels.linear import launch_linear
    from lopa_cuda.ops.fused import sampled_of


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    others = ("test_family_kernels.py", "test_tuning_pair.py")
    interpreted_by_triton(__file__, *(Path(__file__).with_name(name) for name in others))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def dequantized(activation: QuantizedActivation) -> Tensor:
    return activation.values.float() * activation.scale[:, None]


@interpreted
@pytest.mark.parametrize("quantize", [None, "int8", "fp8"])
def test_norm_sums_parts_and_adds_the_residual(quantize: str | None) -> None:
    parts, residual, weight = torch.randn(3, 5, 48), random(5, 48), random(48)
    given = kernels.Partials(parts, None, None, None)
    normed, summed = kernels.add_rms_norm(given, residual, weight, 1e-6, quantize=quantize)
    expected, expected_sum = add_rms_norm(parts.sum(0).bfloat16(), residual, weight, 1e-6)
    assert relative_error(summed, expected_sum) < TOLERANCE
    value = normed if isinstance(normed, Tensor) else dequantized(normed)
    assert relative_error(value, expected) < (TOLERANCE if quantize != "fp8" else 0.06)


@interpreted
def test_norm_of_several_tokens_scales_parts_and_adds_their_bias() -> None:
    parts, residual, weight = torch.randint(-99, 99, (2, 5, 300), dtype=torch.int32), random(5, 300), random(300)
    scale, x_scale, bias = torch.rand(300) / 99, torch.rand(5), random(300)
    given = kernels.Partials(parts, scale, x_scale, bias)
    normed, summed = kernels.add_rms_norm(given, residual, weight, 1e-6)
    x = parts.sum(0).float() * scale * x_scale[:, None] + bias.float()
    expected, expected_sum = add_rms_norm(x.bfloat16(), residual, weight, 1e-6)
    assert isinstance(normed, Tensor)
    assert relative_error(summed, expected_sum) < TOLERANCE and relative_error(normed, expected) < TOLERANCE


def inboxes(dtype: torch.dtype, *shape: int) -> tuple[list[Tensor], Tensor]:
    """Two ranks' empty inboxes, and their addresses."""
    of_ranks = [torch.full(shape, -1, dtype=dtype) for _ in range(2)]
    return of_ranks, torch.tensor([inbox.data_ptr() for inbox in of_ranks])


@interpreted
@pytest.mark.parametrize("num_parts", [0, 3])
def test_norm_sends_its_addend_and_sums_what_it_receives(num_parts: int) -> None:
    """Both ranks in turn: the first finds the second's addend, the second what the first has sent."""
    num_tokens, width, most = 5, 48, 7
    parts, residual = torch.randn(max(num_parts, 1), num_tokens, width), random(num_tokens, width)
    weight = random(width)
    parts[0, 1, :4], parts[1:, 1, :4] = torch.tensor([-0.0, 0.0, torch.nan, torch.inf]), 0.0
    given = kernels.Partials(parts, None, None, None) if num_parts else parts[0].bfloat16()
    own = given if isinstance(given, Tensor) else parts.sum(0).bfloat16()
    theirs = random(num_tokens, width)
    of_ranks, addresses = inboxes(torch.int16, 2, most, width)
    of_ranks[0][1, :num_tokens] = theirs.view(torch.int16)
    normed, summed = kernels.add_rms_norm(kernels.Shared(given, addresses, most * width, 0), residual, weight, 1e-6)
    expected, expected_sum = add_rms_norm(own + theirs, residual, weight, 1e-6)
    for found, wanted in ((summed, expected_sum), (normed, expected)):
        assert isinstance(found, Tensor)
        assert relative_error(found[[0, 2, 3, 4]], wanted[[0, 2, 3, 4]]) < TOLERANCE
    assert torch.equal(summed[1].isnan(), expected_sum[1].isnan())
    sent = of_ranks[1][0, :num_tokens].clone().view(torch.bfloat16)
    assert relative_error(sent[2:], own[2:]) < TOLERANCE and torch.equal(sent[1, :2].signbit(), own[1, :2].signbit())
    _, also_summed = kernels.add_rms_norm(kernels.Shared(theirs, addresses, most * width, 1), residual, weight, 1e-6)
    assert torch.equal(also_summed.nan_to_num(), summed.nan_to_num())
    assert torch.equal(of_ranks[0][1, :num_tokens].view(torch.bfloat16), theirs)  # the second has sent it, too
    assert bool((of_ranks[0][0] == -1).all()) and bool((of_ranks[1] == -1).all())


@interpreted
def test_ranks_stack_their_values_through_both_inboxes_in_turn() -> None:
    num_values, most = 1500, 2048
    of_ranks, addresses = inboxes(torch.int32, 2, 2, most)
    turns = [torch.zeros(2, dtype=torch.int32) for _ in range(2)]
    for turn in (0, 1, 0):
        xs = torch.randn(2, num_values // 3, 3)
        xs[1, 0] = torch.tensor([-0.0, torch.inf, torch.nan])
        xs[0, 0].view(torch.int32).fill_(-1)  # what says that an inbox is empty: a NaN
        of_ranks[0].fill_(-1)[turn, 1, :num_values] = xs[1].view(-1).view(torch.int32)
        for rank in range(2):
            found = kernels.stack_of_ranks(xs[rank], addresses, most, turns[rank], rank)
            assert torch.equal(found.isnan(), xs.isnan()) and torch.equal(found.nan_to_num(), xs.nan_to_num())
            assert bool(found[1, 0, 0].signbit())
        assert bool((of_ranks[1] == -1).all()) and bool((of_ranks[0][1 - turn] == -1).all())
    assert kernels.stack_of_ranks(torch.zeros(0, 3), addresses, most, turns[0], 0).shape == (2, 0, 3)


@interpreted
@pytest.mark.parametrize("num_parts", [0, 2])
def test_rope_rotates_and_prewrites(num_parts: int) -> None:
    num_tokens, kv = 18, (NUM_KV_HEADS, HEAD_SIZE)
    channels = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE
    parts, bias = torch.randn(max(num_parts, 1), num_tokens, channels), random(channels)
    qkv = (parts.sum(0) + bias.float()).bfloat16() if num_parts else parts[0].bfloat16()
    given = kernels.Partials(parts, None, None, bias) if num_parts else qkv
    position, table = torch.randint(0, 50, (num_tokens,)), rotary_table(50, HEAD_SIZE, 1e6, torch.device("cpu"))
    window = torch.full((2, num_tokens + 2, *kv), 7.0).bfloat16()
    query = kernels.rope_prewrite(given, position, table, window, num_heads=NUM_HEADS)
    heads = qkv.view(num_tokens, -1, HEAD_SIZE)
    rotated = rotate(heads[:, : NUM_HEADS + NUM_KV_HEADS], table[position])
    assert relative_error(query, rotated[:, :NUM_HEADS]) < TOLERANCE
    assert relative_error(window[0, :num_tokens], rotated[:, NUM_HEADS:]) < TOLERANCE
    assert relative_error(window[1, :num_tokens], heads[:, NUM_HEADS + NUM_KV_HEADS :]) < TOLERANCE
    assert bool((window[:, num_tokens:] == 7).all())


@interpreted
def test_rope_prewrites_the_memory_of_every_rank() -> None:
    """Each writes its own slice of one layer, at the same place on all of them, and nothing else."""
    num_tokens, first, layer = 18, 5, 1
    qkv = random(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE)
    position, table = torch.randint(0, 50, (num_tokens,)), rotary_table(50, HEAD_SIZE, 1e6, torch.device("cpu"))
    alone = torch.empty(2, num_tokens, NUM_KV_HEADS, HEAD_SIZE).bfloat16()
    expected = kernels.rope_prewrite(qkv, position, table, alone, num_heads=NUM_HEADS)
    of_ranks = [torch.full((3, 2, 30, NUM_KV_HEADS, HEAD_SIZE), 7.0).bfloat16() for _ in range(2)]
    own = of_ranks[1][layer, :, first : first + num_tokens]
    addresses = torch.tensor([memory.data_ptr() for memory in of_ranks])
    mirrors = kernels.Mirrors(addresses, (own.data_ptr() - of_ranks[1].data_ptr()) // own.element_size())
    query = kernels.rope_prewrite(qkv, position, table, own, num_heads=NUM_HEADS, mirrors=mirrors)
    assert torch.equal(query, expected)
    for memory in of_ranks:
        part = memory[layer, :, first : first + num_tokens]
        assert torch.equal(part, alone)
        assert int((memory != 7).sum()) == int((part != 7).sum())


@interpreted
def test_mirrors_may_lie_far_behind_where_memory_begins() -> None:
    """Values at a distance of 2^31 elements whose keys lie before it; the memory in front of them is not there."""
    num_tokens, distance = 4, 2**20
    qkv = random(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE)
    position, table = torch.arange(num_tokens), rotary_table(50, HEAD_SIZE, 1e6, torch.device("cpu"))
    own = torch.zeros(2 * distance).bfloat16().as_strided(
        (2, num_tokens, NUM_KV_HEADS, HEAD_SIZE), (distance, NUM_KV_HEADS * HEAD_SIZE, HEAD_SIZE, 1)
    )  # fmt: skip
    alone = own.clone()
    kernels.rope_prewrite(qkv, position, table, alone, num_heads=NUM_HEADS)
    offset = 2**31 - distance
    mirrors = kernels.Mirrors(torch.tensor([own.data_ptr() - 2 * offset]), offset)
    kernels.rope_prewrite(qkv, position, table, own, num_heads=NUM_HEADS, mirrors=mirrors)
    assert torch.equal(own, alone) and bool(own[1].any())


RAGGED = {
    "after a prefix": [(7, 6, 130, 130, 2), (6, 4, 0, 0, 0), (3, 3, 70, 70, 3), (40, 37, 5, 5, 1)],
    "keys after the window": [(6, 6, 130, 180, 2), (5, 5, 0, 0, 0), (35, 33, 70, 110, 3)],
    "one token": [(1, 1, 64, 64, 1)],
}  # entries, keys, start, cached, slot of each row


@interpreted
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("rows", RAGGED.values(), ids=RAGGED)
def test_attention_of_ragged_rows(rows: list[tuple[int, ...]], num_splits: int) -> None:
    """Covers padding too, which sees its own first key, and tiles to spare."""
    assert_attends(rows, NUM_HEADS, num_splits)


@interpreted
@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_attention_of_every_number_of_query_heads(group: int) -> None:
    assert_attends([(11, 9, 70, 70, 3), (4, 4, 0, 0, 1)], group * NUM_KV_HEADS, 2)


LONG_ROWS = {
    "prompts": [(141, 141, 0, 0, 2), (65, 64, 0, 0, 0)],
    "windows after prefixes": [(130, 129, 70, 70, 3), (9, 9, 64, 64, 1)],
    "keys after windows": [(70, 66, 40, 250, 2), (66, 64, 64, 131, 1)],
}


@interpreted
@pytest.mark.parametrize("rows", LONG_ROWS.values(), ids=LONG_ROWS)
@pytest.mark.parametrize(("block", "num_splits"), [(0, 1), (48, 2)])
def test_attention_of_long_rows(rows: list[tuple[int, ...]], block: int, num_splits: int) -> None:
    """Under full and block-causal attention, whose blocks are no blocks of the kernel."""
    assert_attends(rows, NUM_HEADS, num_splits, is_long=True, block=block)


@interpreted
def test_whole_blocks_are_only_what_every_query_sees() -> None:
    """Horizons are random, some of queries that see nothing."""
    assert_attends(LONG_ROWS["windows after prefixes"], NUM_HEADS, 2, is_long=True)


def assert_attends(
    rows: list[tuple[int, ...]], num_heads: int, num_splits: int, *, is_long: bool = False, block: int | None = None
) -> None:
    """block: entries that see each other under block-causal attention; 0: all do; None: horizons at random."""
    tiling, kv = Tiling(num_heads // NUM_KV_HEADS, kernels.BLOCK_QUERIES), (NUM_KV_HEADS, HEAD_SIZE)
    runs = [Run(1, *row) for row in rows]
    num_entries = sum(run.num_entries for run in runs)
    num_tokens = num_entries + 3
    spans = np.array([(first, *run[1:6]) for first, run in zip(firsts(runs), runs, strict=True)]).T
    tiles = np.full((tiling.needed(spans[1], num_tokens) + 2, RECORD), 9, dtype=np.int32)
    write_tiles(tiles, tiling, spans, num_tokens)
    runs.append(Run(1, 3, 1, 0, 0, 0))
    reach = torch.cat([run.start + reaches(run.num_entries, block) for run in runs])
    query, window = random(num_tokens, num_heads, HEAD_SIZE), random(2, num_tokens + 5, *kv)
    window[:, num_tokens:] = torch.nan
    committed, table = shuffled_pages(rows)
    attended = kernels.window_attention(
        query, committed, window,
        table_SP=table, tiles_N8=torch.from_numpy(tiles), horizon_T=reach.int(), num_splits=num_splits, is_long=is_long,
    )  # fmt: skip
    for first, run in zip(firsts(runs), runs, strict=True):
        own = slice(first, first + run.num_entries)
        cached = gathered(committed, table, run)
        expected = plain_attention(query[own], cached, window[:, own][:, : run.num_keys], reach[own], run)
        # A row that sees nothing has expected values of 0, and every value must be 0.
        assert relative_error(attended[own], expected) < TOLERANCE or torch.equal(attended[own].float(), expected)


def reaches(num_entries: int, block: int | None) -> Tensor:
    """Return how far after its row's start each entry sees (`assert_attends`)."""
    if block is None:
        return torch.randint(0, num_entries + 2, (num_entries,))
    return torch.full((num_entries,), num_entries) if block == 0 else (torch.arange(num_entries) // block + 1) * block


@interpreted
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("length", "is_long"), [(40, False), (47, False), (70, True)])
def test_slices_of_a_pass_attend_what_its_rows_do(num_ranks: int, length: int, is_long: bool) -> None:
    """Each rank's queries alone, over the keys of all; slices cut rows in pieces, and the last are short or empty."""
    rows = LONG_ROWS["windows after prefixes"][::-1] if is_long else RAGGED["keys after the window"]
    plan = plan_of(rows, least_reach=70 if is_long else 1)
    num_staged = max(num_ranks * length, plan.num_tokens)
    tiling = Tiling(NUM_HEADS // NUM_KV_HEADS, kernels.BLOCK_QUERIES)
    query, window = random(num_staged, NUM_HEADS, HEAD_SIZE), random(2, num_staged, NUM_KV_HEADS, HEAD_SIZE)
    committed, table = shuffled_pages(rows)

    def attended(share: Share, first: int, num_tokens: int) -> Tensor:
        tiles = np.full((tiling.needed(share.spans_6R[1], num_tokens) + 2, RECORD), 9, dtype=np.int32)
        write_tiles(tiles, tiling, share.spans_6R, num_tokens, share.first_key_R)
        reach = torch.zeros(num_tokens, dtype=torch.int32)
        reach[: share.num_tokens] = torch.from_numpy(share.of_entries(plan.horizon_T))
        found = kernels.window_attention(
            query[first : first + num_tokens], committed, window, table_SP=table, tiles_N8=torch.from_numpy(tiles),
            horizon_T=reach, num_splits=2, is_long=is_long,
        )  # fmt: skip
        return found[: share.num_tokens]

    (whole,) = deal(plan, np.arange(plan.num_rows)[None])
    expected = attended(whole, 0, plan.num_tokens)
    for rank, share in enumerate(cut(plan, num_ranks, length)):
        first = rank * length
        if first < plan.num_tokens:
            found, wanted = attended(share, first, length), expected[first : first + share.num_tokens]
            # Which blocks of a tile are whole, and so computed first, depends on its other queries.
            assert relative_error(found, wanted) < TOLERANCE if is_long else torch.equal(found, wanted)


def plan_of(rows: list[tuple[int, ...]], least_reach: int = 1) -> StepPlan:
    """One row a request, whose entries see at least so many of its own, and up to 38 more at random."""
    num_rows, num_tokens = len(rows), sum(row[0] for row in rows)
    row_fields_8R = np.zeros((len(RowField), num_rows), dtype=np.int64)
    row_fields_8R[1:6] = np.array(rows).T
    row_fields_8R[RowField.FIRST] = row_fields_8R[1].cumsum() - row_fields_8R[1]
    start_T = row_fields_8R[RowField.START].repeat(row_fields_8R[RowField.NUM_ENTRIES])
    entries_3T = np.zeros((3, num_tokens), dtype=np.int64)
    entries_3T[2] = start_T + np.random.default_rng(0).integers(least_reach, least_reach + 39, num_tokens)
    sampling = Sampling("default", 0)
    is_read_T = np.zeros(num_tokens, dtype=np.bool_)
    return StepPlan(entries_3T, is_read_T, row_fields_8R, np.arange(num_rows), (), sampling, commits_locally=False)


def shuffled_pages(rows: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Pages of four slots in no order, and their table; what no row has cached is no number."""
    table = torch.randperm(20)[:16].reshape(4, 4).int()
    committed = torch.full((2, 20, PAGE_SIZE, NUM_KV_HEADS, HEAD_SIZE), torch.nan).bfloat16()
    for *_, cached, slot in rows:
        for index, page in enumerate(table[slot].tolist()):
            count = max(0, min(PAGE_SIZE, cached - index * PAGE_SIZE))
            committed[:, page, :count] = random(2, count, NUM_KV_HEADS, HEAD_SIZE)
    return committed, table


def gathered(committed: Tensor, table: Tensor, run: Run) -> Tensor:
    """[2, C, K, H], as TorchOps gathers them."""
    pages = table[run.slot, : pages_for(run.cached, PAGE_SIZE)]
    return committed.index_select(1, pages).flatten(1, 2)[:, : run.cached]


def firsts(runs: list[Run]) -> list[int]:
    return [0, *itertools.accumulate(run.num_entries for run in runs)][: len(runs)]


def plain_attention(query: Tensor, cached: Tensor, window: Tensor, horizon: Tensor, run: Run) -> Tensor:
    """Return the attention of one row."""
    group = query.shape[1] // NUM_KV_HEADS
    key, value = (torch.cat((cached[part], window[part])).float().repeat_interleave(group, 1) for part in (0, 1))
    score = torch.einsum("wnh,xnh->nwx", query.float() * HEAD_SIZE**-0.5, key)
    weight = score.masked_fill(~visible_keys(horizon[None], run)[0], -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("nwx,xnh->wnh", weight, value).reshape(len(query), -1)


@interpreted
@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("num_tokens", [5, 64])
@pytest.mark.parametrize("splits", [1, 3])
def test_skinny_linear(kind: str, num_tokens: int, splits: int) -> None:
    x, weight, bias = random(num_tokens, 128), random(64, 128), random(64)
    config = LinearConfig(block_c=32, block_k=32, splits=splits, stages=2)
    if kind == "bf16":
        y = kernels.sum_partials(launch_linear(x, None, weight, bias, None, config))
        expected = x.float() @ weight.float().T + bias.float()
    else:
        plain = w8a8 if kind == "int8" else fp8
        quantized_x, quantized_weight = plain.quantize_per_token(x), plain.quantize_weight(weight)
        operands = quantized_weight.values, bias, quantized_weight.scale
        y = kernels.sum_partials(launch_linear(*quantized_x, *operands, config))
        expected = plain.linear(
            quantized_x.values, quantized_weight.values, quantized_weight.scale, quantized_x.scale, bias, torch.float32
        )
    assert relative_error(y, expected) < TOLERANCE


@interpreted
@pytest.mark.parametrize("tail", [0, 16])
def test_gate_up_fuses_swiglu_and_masks_its_last_tile(tail: int) -> None:
    x, weight = random(64, 64), random(2 * 80, 64) * 0.1
    y = launch_linear(x, None, weight, None, None, LinearConfig(32, 32, 1, 2, tail=tail), is_gated=True)
    assert relative_error(y, swiglu(x.float() @ weight.float().T)) < TOLERANCE


@interpreted
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_row_in_two_blocks_is_quantized_as_in_one(kind: kernels.Quantize, monkeypatch: pytest.MonkeyPatch) -> None:
    x, gate_up = random(5, 300), random(5, 600)
    x[:, 290] = torch.tensor([9.0, 0, -9, 0, 0])  # the largest of some rows are in the tail
    x[3] = 0
    one_block = kernels.quantize_per_token(x, kind), kernels.swiglu(gate_up, quantize=kind)
    for name in ("SHORT_ROW", "FEW_TOKENS"):
        monkeypatch.setattr(f"lopa_cuda.kernels.quantize.{name}", 1)
    two_blocks = kernels.quantize_per_token(x, kind), kernels.swiglu(gate_up, quantize=kind)
    for one, two in zip(one_block, two_blocks, strict=True):
        assert isinstance(one, QuantizedActivation) and isinstance(two, QuantizedActivation)
        assert torch.equal(one.scale, two.scale) and torch.equal(one.values.float(), two.values.float())


@interpreted
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_swiglu(quantize: str | None) -> None:
    x = random(5, 2 * 100)
    y = kernels.swiglu(x, quantize=quantize)
    value = y if isinstance(y, Tensor) else dequantized(y)
    assert relative_error(value, swiglu(x.float())) < TOLERANCE


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_rows_are_copied_whole_and_by_an_index(dtype: torch.dtype) -> None:
    parts = [random(5, 48).to(dtype), torch.randn(5), random(5, 34)]
    places = [torch.zeros_like(part.repeat(2, *[1] * (part.dim() - 1))) for part in parts]
    kernels.copy_rows(parts, [place[:5] for place in places])
    index = torch.tensor([4, 0, 0, 2, 4, 1, 3], dtype=torch.int32)
    taken = [torch.empty_like(place[:7]) for place in places]
    kernels.copy_rows(places, taken, index)
    for part, place, rows in zip(parts, places, taken, strict=True):
        assert torch.equal(place[:5].float(), part.float()) and not place[5:].float().any()
        assert torch.equal(rows.float(), part.float()[index.long()])
    kernels.copy_rows(parts[:2], [place[:5] for place in places[:2]])


@interpreted
def test_static_quantization() -> None:
    x, scale, offset = random(5, 100), torch.tensor([0.02]), torch.tensor([3.0])
    assert torch.equal(kernels.quantize_static(x, scale, offset), w8a8.quantize_static(x, scale, offset))


@interpreted
def test_head_statistics_ties_go_to_the_lower_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["lopa_cuda.kernels.head_statistics"], "BLOCK_VOCAB", 128)
    logits = random(7, 500) * 4
    logits[3, 400] = logits[3, 17] = logits[4, 20] = logits[4, 21] = 30.0
    logits[5, 101] = 99.0  # the mask id
    for strategy, unused in (("default", (2, 4)), ("margin", (4,)), ("neg_entropy", (2,))):
        sampling = Sampling(strategy, 1101)
        statistics, wanted = kernels.head_statistics(logits, 1000, sampling), shard_statistics(logits, 1000, sampling)
        columns = [column for column in range(6) if column not in unused]
        torch.testing.assert_close(statistics[:, columns], wanted[:, columns])
        assert statistics[3, 1] == 1017 and statistics[4, 1] == 1020


@interpreted
@pytest.mark.parametrize(("is_sampled", "tempers"), [(False, False), (True, False), (True, True)])
def test_classes_are_reduced_as_by_plain_operators(
    is_sampled: bool, tempers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, places = np.array([(setting[0], 1, 0) for setting in SAMPLED_ROWS], dtype=np.float32), np.arange(8)
    fields = torch.from_numpy(sampling_fields(settings.T, places // 4 + 3, places, places * 5, len(places)))
    rows = SamplingRows.of(fields) if is_sampled else None
    class_V = np.array([0, 1, 1, 4, 2, 2, 2, 2] * 75)  # several tiles, one token, the mask token alone, none
    class_V[[17, 3]] = 3, 0
    class_V[class_V == 4] = 2
    logits = random(len(places), len(class_V)) * 4
    logits[2, 1] = logits[2, 10] = 50.0  # a tie
    tiles, sampling = Tiles.of(class_V, 5, logits.device), Sampling("default", 117, tempers_confidence=tempers)
    found = kernels.class_statistics(logits, 100, tiles, sampling, rows)
    wanted = class_statistics(logits.clone(), 100, tiles, sampling, rows)
    monkeypatch.setattr(plain_tiles, "_MOST_VALUES", 3 * tiles.token_KB.numel())
    assert torch.equal(wanted, class_statistics(logits.clone(), 100, tiles, sampling, rows)), "three positions at once"
    torch.testing.assert_close(found[:, :3], wanted[:, :3], rtol=1e-4, atol=1e-4)
    assert (found[:, 3:, 1:] <= -1e29).all() and (wanted[:, 3:, 1:] <= -1e29).all()
    assert is_sampled or found[2, 1, 0] == 101


@interpreted
@pytest.mark.parametrize("strategy", ["default", "margin", "neg_entropy"])
def test_shards_merge(strategy: str) -> None:
    logits = random(7, 400).float() * 4
    parts = enumerate(logits.split(100, dim=1))
    statistics = torch.stack([shard_statistics(part, 100 * i, Sampling(strategy, 17)) for i, part in parts])
    torch.testing.assert_close(kernels.merge_statistics(statistics, strategy), merge_statistics(statistics, strategy))


@interpreted
@pytest.mark.parametrize(
    ("strategy", "tempers", "num_shards"),
    [("default", False, 1), ("margin", False, 2), ("neg_entropy", False, 1), ("neg_entropy", True, 2)],
)
@pytest.mark.parametrize("is_cut", [False, True])
def test_samples_are_those_of_the_plain_version(
    monkeypatch: pytest.MonkeyPatch, strategy: str, is_cut: bool, tempers: bool, num_shards: int
) -> None:
    """Greedy rows and drawn ones in one pass, on one vocabulary shard and on two."""
    monkeypatch.setattr(sys.modules["lopa_cuda.kernels.head_statistics"], "BLOCK_VOCAB", 128)
    settings = np.array(SAMPLED_ROWS, dtype=np.float32)
    settings[:, 1:] = settings[:, 1:] if is_cut else (1, 0)
    places = np.arange(len(settings))
    rows = SamplingRows.of(
        torch.from_numpy(sampling_fields(settings.T, places // 4 + 3, places, places * 5, len(places)))
    )
    sampling = Sampling(cast(Any, strategy), 117, is_sampled=True, is_cut=is_cut, tempers_confidence=tempers)
    logits = random(len(places), 800) * 4
    logits[3, 17] = 99.0  # the mask id
    wanted = sampled_statistics(logits, 100, sampling, rows, lambda value: value[None])
    size = 800 // num_shards

    def on_shard(rank: int, gather: Gather) -> Tensor:
        shard = logits[:, rank * size : (rank + 1) * size].clone()
        return sampled_of(shard, 100 + rank * size, sampling, rows, gather)

    for found in on_ranks(num_shards, on_shard):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    greedy = merge_statistics(kernels.head_statistics(logits, 100, sampling)[None], strategy)
    torch.testing.assert_close(wanted[settings[:, 0] == 0], greedy[settings[:, 0] == 0], rtol=1e-4, atol=1e-4)
    if not tempers:  # of tokens that tie any may be drawn, and they are as probable
        is_least = settings[:, 0] == np.float32(MIN_TEMPERATURE)
        torch.testing.assert_close(wanted[is_least, 1:], greedy[is_least, 1:], rtol=1e-4, atol=1e-4)
    assert (wanted[:, 0] != greedy[:, 0]).any()
