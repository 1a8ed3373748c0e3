"""The Triton kernels on a GPU against their plain versions in float32 or float64, at Dream-7B's and the demo's shapes.

bf16 results may differ from the reference by rounding: relative error (norm of the difference over norm) under 1e-2.
Outputs are poisoned through the allocator's reuse: every check draws new random inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config import MIN_TEMPERATURE
from common.decoding import Sampling
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
from lopa_cuda.ops.plain import visible_keys
from lopa_cuda.steps import PAGE_SIZE, RECORD, Run, Tiling, write_tiles
from lopa_cuda.tiles import LinearConfig, find_config, load_tiles, only_tiles, this_device
from quant import fp8, w8a8
from tests.exchange import on_ranks

pytestmark = pytest.mark.cuda
if torch.cuda.is_available():
    pytest.importorskip("triton", reason="the kernels need Triton")
    from lopa_cuda import kernels
    from lopa_cuda.kernels.linear import launch_linear
    from lopa_cuda.ops.fused import sampled_of

BF16_TOLERANCE = 1e-2
# temperature, top_p, top_k
SAMPLED_ROWS = [
    (0, 1, 0), (1e-3, 1, 0), (0.05, 0.9, 0), (0.3, 1, 0), (0.7, 1, 5), (1.0, 0.5, 7), (1.5, 0.9, 0), (2.0, 1, 0),
]  # fmt: skip
DREAM, DEMO, LLADA = (28, 4, 128), (4, 2, 64), (32, 32, 128)  # heads, KV heads, head size


@pytest.fixture(scope="module", autouse=True)
def committed_tiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What ships for this device, without what its user has measured."""
    with only_tiles(load_tiles(this_device(), own=tmp_path_factory.mktemp("none")).table):
        yield


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()


def relative_error(value: Tensor, reference: Tensor) -> float:
    value, reference = value.double(), reference.double().to(value.device)
    assert value.isfinite().all(), "every element must be written and finite"
    return float((value - reference).norm() / reference.norm())


def parts_of(x_TC: Tensor, num_parts: int) -> kernels.Partials:
    """Split-K parts whose sum is x."""
    noise = torch.randn(num_parts - 1, *x_TC.shape, device="cuda")
    return kernels.Partials(torch.cat((noise, x_TC.float()[None] - noise.sum(0))), None, None, None)


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 256), (37, 256), (9, 672), (64, 3584), (200, 3584)])
@pytest.mark.parametrize("num_parts", [0, 1, 7])
def test_norm_adds_the_residual_first(num_tokens: int, width: int, num_parts: int) -> None:
    x, residual, weight = random(num_tokens, width), random(num_tokens, width, seed=1), random(width, seed=2)
    given = parts_of(x, num_parts) if num_parts else x
    normed, summed = kernels.add_rms_norm(given, residual, weight, 1e-6)
    expected, expected_sum = add_rms_norm(x, residual, weight, 1e-6)
    assert relative_error(summed, expected_sum) < BF16_TOLERANCE
    assert relative_error(normed, expected) < BF16_TOLERANCE
    assert torch.equal(kernels.add_rms_norm(x, None, weight, 1e-6)[1], x)


@pytest.mark.parametrize(("kind", "plain"), [("int8", w8a8), ("fp8", fp8)])
def test_quantized_outputs_follow_the_plain_arithmetic(kind: str, plain: object) -> None:
    x, weight = random(64, 3584), random(3584, seed=2)
    x[3] = 0
    normed, _ = kernels.add_rms_norm(x, None, weight, 1e-6)
    from_norm, _ = kernels.add_rms_norm(x, None, weight, 1e-6, quantize=kind)
    gate_up = random(64, 2 * 18944)
    cases = [
        (from_norm, normed),
        (kernels.quantize_per_token(x, kind), x),
        (kernels.swiglu(gate_up, quantize=kind), kernels.swiglu(gate_up)),
    ]
    for quantized, given in cases:
        expected = plain.quantize_per_token(given.cpu())  # the specification on the CPU, whose division is exact
        assert torch.equal(quantized.scale.cpu(), expected.scale)
        # As numbers, not as bits: a row of zeros times a negative norm weight is -0 in one and 0 in the other.
        assert torch.equal(quantized.values.cpu().float(), expected.values.float())


def test_static_quantization() -> None:
    x, scale, offset = random(64, 3584), torch.tensor([0.02], device="cuda"), torch.tensor([3.0], device="cuda")
    values = kernels.quantize_static(x, scale, offset)
    assert torch.equal(values.cpu(), w8a8.quantize_static(x.cpu(), scale.cpu(), offset.cpu()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("width", [34, 3584])
def test_rows_are_copied_whole_and_by_an_index(dtype: torch.dtype, width: int) -> None:
    parts = [random(200, 48).to(dtype), torch.randn(200, device="cuda"), random(200, width)]
    places = [torch.empty_like(part.repeat(2, *[1] * (part.dim() - 1))) for part in parts]
    kernels.copy_rows(parts, [place[:200] for place in places])
    index = torch.randint(200, (37,), dtype=torch.int32, device="cuda")
    taken = [torch.empty_like(place[:37]) for place in places]
    kernels.copy_rows(places, taken, index)
    for part, rows in zip(parts, taken, strict=True):
        assert torch.equal(rows.float(), part.float()[index])


def test_swiglu() -> None:
    x = random(70, 2 * 18944)
    assert relative_error(kernels.swiglu(x), swiglu(x.float())) < BF16_TOLERANCE


@pytest.mark.parametrize(
    ("heads", "num_parts", "dtype"), list(product((DREAM, DEMO), (0, 4), (torch.int32, torch.int64)))
)
def test_rope_rotates_and_prewrites(heads: tuple[int, int, int], num_parts: int, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, size = heads
    num_tokens = 72
    qkv, bias = random(num_tokens, (num_heads + 2 * num_kv_heads) * size), random(num_heads * size, seed=3)
    bias = random((num_heads + 2 * num_kv_heads) * size, seed=3)
    position = torch.randint(0, 4096, (num_tokens,), device="cuda", dtype=dtype)
    table = rotary_table(4096, size, 1e6, torch.device("cuda"))
    window = torch.full((2, num_tokens + 8, num_kv_heads, size), 7.0, device="cuda").bfloat16()
    given = parts_of(qkv, num_parts)._replace(bias=bias) if num_parts else (qkv + bias)
    query = kernels.rope_prewrite(given, position, table, window, num_heads=num_heads)
    full = (qkv + bias).view(num_tokens, -1, size)
    rotated = rotate(full[:, : num_heads + num_kv_heads], table[position.long()])
    assert relative_error(query, rotated[:, :num_heads]) < BF16_TOLERANCE
    assert relative_error(window[0, :num_tokens], rotated[:, num_heads:]) < BF16_TOLERANCE
    assert relative_error(window[1, :num_tokens], full[:, num_heads + num_kv_heads :]) < BF16_TOLERANCE
    assert (window[:, num_tokens:] == 7).all()


def firsts(runs: list[Run]) -> list[int]:
    """The first token of each row."""
    return [0, *accumulate(run.num_entries for run in runs)][: len(runs)]


def tiles_of(runs: list[Run], group: int, num_tokens: int) -> Tensor:
    """Return the tiles of these rows (runs of one row each), padded to num_tokens, with tiles to spare."""
    tiling = Tiling(group, kernels.BLOCK_QUERIES)
    spans = np.array([(first, *run[1:6]) for first, run in zip(firsts(runs), runs, strict=True)]).T
    needed = tiling.needed(spans[1], num_tokens)
    tiles = np.full((max(tiling.room(num_tokens), needed + 1), RECORD), 9, dtype=np.int32)
    write_tiles(tiles, tiling, spans, num_tokens)
    return torch.from_numpy(tiles).cuda()


def shuffled_table(num_slots: int, num_pages: int) -> Tensor:
    """Return the table of slots with as many pages each, in no order."""
    return torch.randperm(num_slots * num_pages, device="cuda").view(num_slots, num_pages).int()


def plain_attention(
    query: Tensor, committed: Tensor, table: Tensor, window: Tensor, horizon: Tensor, runs: list[Run]
) -> Tensor:
    """float64, row by row; 0 for a query that sees nothing."""
    attended = []
    for first, run in zip(firsts(runs), runs, strict=True):
        own = slice(first, first + run.num_entries)
        visible = visible_keys(horizon[None, own].long(), run)[0]
        group = query.shape[1] // window.shape[-2]
        pages = table[run.slot, : pages_for(run.cached, PAGE_SIZE)]
        cached = committed.index_select(1, pages).flatten(1, 2)[:, : run.cached]
        key, value = (
            torch.cat((cached[i], window[i, own][: run.num_keys])).double().repeat_interleave(group, 1) for i in (0, 1)
        )
        score = torch.einsum("wnh,xnh->nwx", query[own].double(), key.nan_to_num()) * query.shape[-1] ** -0.5
        weight = score.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
        attended.append(torch.einsum("nwx,xnh->wnh", weight, value.nan_to_num()).flatten(1))
    return torch.cat(attended)


# Entries, keys, start, cached and slot of each row.
ROWS = {
    "one row": [(64, 64, 1024, 1024, 3)],
    "no prefix": [(96, 96, 0, 0, 0), (41, 40, 0, 0, 1)],
    "branches of many lengths": [
        (48, 48, 1500, 1500, 2), (40, 33, 1500, 1500, 2), (48, 48, 37, 37, 0), (1, 1, 4000, 4000, 4),
    ],
    "keys after the window": [(32, 32, 300, 700, 1), (24, 17, 64, 100, 2)],
    "a prompt beside branches": [(1000, 1000, 0, 0, 4), *[(64, 64, 800, 800, 1)] * 7, (96, 96, 800, 800, 1)],
}  # fmt: skip


@pytest.mark.parametrize("heads", [DREAM, DEMO], ids=["dream", "demo"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize("num_padding", [0, 21])
def test_attention_sees_the_committed_keys_and_its_window(
    heads: tuple[int, int, int], rows: list[tuple[int, ...]], num_splits: int | None, num_padding: int
) -> None:
    num_heads, num_kv_heads, size = heads
    runs = [Run(1, *row) for row in rows]
    num_tokens = sum(run.num_entries for run in runs) + num_padding
    tiles = tiles_of(runs, num_heads // num_kv_heads, num_tokens)
    table = shuffled_table(5, 4096 // PAGE_SIZE)
    committed = random(2, table.numel(), PAGE_SIZE, num_kv_heads, size)
    window = random(2, num_tokens + 8, num_kv_heads, size)
    runs += [Run(1, num_padding, 1, 0, 0, 0)] if num_padding else []
    horizon = torch.full((num_tokens,), 2**31 - 1, device="cuda", dtype=torch.int32)
    for first, run in zip(firsts(runs), runs, strict=True):
        # The last entry sees all.
        reach = torch.randint(0, run.num_entries, (run.num_entries - 1,), device="cuda", dtype=torch.int32)
        horizon[first : first + run.num_entries - 1] = run.start + reach
        window[:, first + run.num_keys : first + run.num_entries] = torch.nan  # keys that nobody may see
    window[:, num_tokens:] = torch.nan
    query = random(num_tokens, num_heads, size, seed=5)
    attended = kernels.window_attention(
        query, committed, window, table_SP=table, tiles_N8=tiles, horizon_T=horizon, num_splits=num_splits
    )
    expected = plain_attention(query, committed, table, window, horizon, runs)
    assert relative_error(attended, expected) < BF16_TOLERANCE


LONG_ROWS = {
    "a prompt": [(1040, 1040, 0, 0, 1)],
    "prompts of several lengths": [(600, 600, 0, 0, 2), (131, 128, 0, 0, 0), (520, 519, 0, 0, 1)],
    "windows after prefixes": [(194, 193, 1024, 1024, 3), (300, 300, 70, 70, 0), (65, 64, 128, 128, 1)],
    "keys after windows": [(520, 500, 300, 1000, 1), (140, 131, 40, 250, 2)],
}


@pytest.mark.parametrize("heads", [DREAM, DEMO, LLADA], ids=["dream", "demo", "llada"])
@pytest.mark.parametrize("rows", LONG_ROWS.values(), ids=LONG_ROWS)
@pytest.mark.parametrize("block", [None, 32, 100])
@pytest.mark.parametrize("num_splits", [None, 2])
def test_attention_of_long_rows(
    heads: tuple[int, int, int], rows: list[tuple[int, ...]], block: int | None, num_splits: int | None
) -> None:
    """Under full and block-causal attention, whose blocks are no blocks of the kernel."""
    num_heads, num_kv_heads, size = heads
    runs = [Run(1, *row) for row in rows]
    num_tokens = sum(run.num_entries for run in runs)
    table = shuffled_table(5, 1024 // PAGE_SIZE)
    committed = random(2, table.numel(), PAGE_SIZE, num_kv_heads, size)
    query, window = random(num_tokens, num_heads, size, seed=5), random(2, num_tokens, num_kv_heads, size)
    horizon = torch.zeros(num_tokens, device="cuda", dtype=torch.int32)
    for first, run in zip(firsts(runs), runs, strict=True):
        entry = torch.arange(run.num_entries, device="cuda")
        reach = run.num_entries if block is None else (entry // block + 1) * block
        horizon[first : first + run.num_entries] = run.start + reach
        window[:, first + run.num_keys : first + run.num_entries] = torch.nan
    attended = kernels.window_attention(
        query, committed, window, table_SP=table, tiles_N8=tiles_of(runs, num_heads // num_kv_heads, num_tokens),
        horizon_T=horizon, num_splits=num_splits,
    )  # fmt: skip
    expected = plain_attention(query, committed, table, window, horizon, runs)
    assert relative_error(attended, expected) < BF16_TOLERANCE


def test_attention_quantizes_its_output() -> None:
    rows = {
        "table_SP": shuffled_table(1, 16),
        "tiles_N8": tiles_of([Run(1, 32, 32, 512, 512, 0)], 7, 32),
        "horizon_T": torch.full((32,), 544, device="cuda", dtype=torch.int32),
    }
    query, committed, window = random(32, 28, 128), random(2, 16, PAGE_SIZE, 4, 128), random(2, 32, 4, 128)
    for num_splits in (1, 4):
        plain = kernels.window_attention(query, committed, window, **rows, num_splits=num_splits)
        quantized = kernels.window_attention(query, committed, window, **rows, num_splits=num_splits, quantize="int8")
        expected = w8a8.quantize_per_token(plain.cpu())
        assert torch.equal(quantized.values.cpu(), expected.values)
        assert torch.equal(quantized.scale.cpu(), expected.scale)


@pytest.mark.parametrize("num_tokens", [1, 8, 33, 64, 100, 128])
@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize(
    "config", [LinearConfig(64, 128, 1, 4), LinearConfig(64, 128, 7, 3), LinearConfig(128, 128, 4, 3, swap=True)]
)
def test_skinny_linear(num_tokens: int, kind: str, config: LinearConfig) -> None:
    x, weight, bias = random(num_tokens, 3584), random(1152, 3584, scale=0.02, seed=1), random(1152, seed=2)
    if kind == "bf16":
        parts = launch_linear(x, None, weight, bias, None, config)
        expected = x.double() @ weight.double().T + bias.double()
    else:
        plain = w8a8 if kind == "int8" else fp8
        quantized_x, quantized_weight = plain.quantize_per_token(x), plain.quantize_weight(weight)
        parts = launch_linear(*quantized_x, quantized_weight.values, bias, quantized_weight.scale, config)
        expected = plain.linear(
            quantized_x.values, quantized_weight.values, quantized_weight.scale, quantized_x.scale, bias, torch.bfloat16
        )
    y = kernels.sum_partials(parts)
    assert relative_error(y, expected) < (5e-3 if kind != "int8" else 1e-5), "int8 sums are exact"
    assert torch.equal(y, kernels.sum_partials(parts)), "the order of the sum is fixed"


def test_static_int8_adds_its_bias_before_the_scale() -> None:
    x, weight = random(32, 3584), w8a8.quantize_weight(random(512, 3584, seed=1))
    values = w8a8.quantize_static(x, torch.tensor([0.02], device="cuda"), torch.tensor([3.0], device="cuda"))
    bias = torch.randint(-(2**20), 2**20, (512,), device="cuda", dtype=torch.int32)
    expected = w8a8.linear(values, weight.values, weight.scale, None, bias, torch.bfloat16)
    for config in (LinearConfig(64, 128, 1, 3), LinearConfig(64, 128, 4, 3)):
        y = kernels.sum_partials(launch_linear(values, None, weight.values, bias, weight.scale, config))
        assert torch.equal(y, expected)


@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("num_tokens", [16, 64, 128])
@pytest.mark.parametrize("tail", [0, 16])
def test_gate_up_fuses_swiglu(kind: str, num_tokens: int, tail: int) -> None:
    if tail and num_tokens < 64:
        pytest.skip("tails are for tiles of at least 64 tokens")
    x, weight = random(num_tokens, 3584), random(2 * 1024, 3584, scale=0.02, seed=1)
    config = LinearConfig(64, 64 if kind == "bf16" else 128, 1, 3, warps=8 if num_tokens > 64 else 4, tail=tail)
    if kind == "bf16":
        y = launch_linear(x, None, weight, None, None, config, is_gated=True)
        expected = swiglu(x.float() @ weight.float().T)
    else:
        plain = w8a8 if kind == "int8" else fp8
        quantized_x, quantized_weight = plain.quantize_per_token(x), plain.quantize_weight(weight)
        operands = quantized_weight.values, None, quantized_weight.scale
        y = launch_linear(*quantized_x, *operands, config, is_gated=True)
        expected = swiglu(plain.linear(*(quantized_x.values, *operands[::2], quantized_x.scale, None), torch.float32))
    assert relative_error(y, expected) < BF16_TOLERANCE


@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("num_tokens", [1, 32, 64, 128, 600])
def test_linears_of_the_model_from_table_or_library(kind: str, num_tokens: int) -> None:
    for num_out, num_in in ((4608, 3584), (3584, 3584), (3584, 18944)):
        x, weight, bias = (
            random(num_tokens, num_in),
            random(num_out, num_in, scale=0.02, seed=1),
            random(num_out, seed=2),
        )
        if kind == "bf16":
            y = kernels.linear(x, weight, bias)
            assert relative_error(y, x.double() @ weight.double().T + bias) < 5e-3
            continue
        plain = w8a8 if kind == "int8" else fp8
        quantized_x, quantized_weight = plain.quantize_per_token(x), plain.quantize_weight(weight)
        y = kernels.linear(quantized_x, quantized_weight.values, bias, quantized_weight.scale)
        operands = quantized_x.values, quantized_weight.values, quantized_weight.scale, quantized_x.scale, bias
        assert relative_error(y, plain.linear(*operands, torch.bfloat16)) < 5e-3


@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("num_tokens", [1, 32, 64, 128, 200])
def test_gate_up_of_the_model_from_table_or_library(kind: str, num_tokens: int) -> None:
    x, weight = random(num_tokens, 3584), random(2 * 18944, 3584, scale=0.02, seed=1)
    if kind == "bf16":
        y = kernels.gate_up_swiglu(x, weight)
        gate_up = x.float() @ weight.float().T
    else:
        plain = w8a8 if kind == "int8" else fp8
        quantized_x, quantized_weight = plain.quantize_per_token(x), plain.quantize_weight(weight)
        y = kernels.gate_up_swiglu(quantized_x, *quantized_weight)
        gate_up = plain.linear(quantized_x.values, *quantized_weight, quantized_x.scale, None, torch.float32)
    assert relative_error(y, swiglu(gate_up)) < BF16_TOLERANCE


@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("num_tokens", [5, 64, 65, 128])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_ranks_share_of_the_linears(kind: str, tp: int, num_tokens: int) -> None:
    shares = ((4608 // tp, 3584), (3584, 3584 // tp), (3584, 18944 // tp), (152064 // tp, 3584))
    assert find_config(kind, *shares[0], num_tokens, "none") is not None
    for num_out, num_in in shares[: 4 if kind == "bf16" else 3]:
        x, weight = random(num_tokens, num_in), random(num_out, num_in, scale=0.02, seed=1)
        y, expected = linear_and_twin(kind, x, weight, kernels.linear)
        assert relative_error(y, expected) < 5e-3
    x, weight = random(num_tokens, 3584), random(2 * 18944 // tp, 3584, scale=0.02, seed=1)
    y, expected = linear_and_twin(kind, x, weight, lambda x, w, _, scale=None: kernels.gate_up_swiglu(x, w, scale))
    assert relative_error(y, swiglu(expected.float())) < BF16_TOLERANCE


def linear_and_twin(kind: str, x: torch.Tensor, weight: torch.Tensor, run: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What run(x, weight, bias, scale) makes of the operands, and their product in fp32."""
    if kind == "bf16":
        return run(x, weight, None), x.float() @ weight.float().T
    plain = w8a8 if kind == "int8" else fp8
    quantized_x, quantized = plain.quantize_per_token(x), plain.quantize_weight(weight)
    expected = plain.linear(
        quantized_x.values, quantized.values, quantized.scale, quantized_x.scale, None, torch.float32
    )
    return run(quantized_x, quantized.values, None, quantized.scale), expected


@pytest.mark.parametrize(("vocab_start", "vocab_size"), [(0, 152064), (38016, 38016), (0, 500)])
def test_head_statistics_in_one_pass(vocab_start: int, vocab_size: int) -> None:
    logits = random(37, vocab_size, scale=6.0)
    mask_token_id = vocab_start + vocab_size - 3
    logits[:, -3] = 99.0
    logits[5, vocab_size // 2] = logits[5, 11] = 98.0  # a tie: the lower id wins, the second best is as good
    samplings = Sampling("margin", mask_token_id), Sampling("neg_entropy", mask_token_id)
    whole = logits.double().cpu().float()
    expected, of_entropy = (shard_statistics(whole, vocab_start, sampling) for sampling in samplings)
    expected[:, 4] = of_entropy[:, 4]
    statistics, of_entropy = (kernels.head_statistics(logits, vocab_start, sampling) for sampling in samplings)
    statistics[:, 4] = of_entropy[:, 4]
    assert statistics[5, 1] == vocab_start + 11 and statistics[5, 2] == 98.0
    torch.testing.assert_close(statistics[:, [0, 2, 5]].cpu(), expected[:, [0, 2, 5]], rtol=0, atol=0)
    torch.testing.assert_close(statistics[:, 3:5].cpu(), expected[:, 3:5], rtol=2e-5, atol=1e-4)
    is_unique = (logits[:, :-3] == statistics[:, :1]).sum(1).cpu() == 1
    assert torch.equal(statistics[is_unique.cuda(), 1].cpu(), expected[is_unique, 1])


@pytest.mark.parametrize(("num_out", "num_in"), [(4608, 3584), (3584, 18944), (1344, 256), (256, 672)])
def test_invariant_products_are_the_same_bits_among_any_number_of_tokens(num_out: int, num_in: int) -> None:
    x, weight, bias = random(3000, num_in), random(num_out, num_in, scale=0.02), random(num_out)
    whole = kernels.invariant_linear(x, weight, bias)
    assert relative_error(whole, x.float() @ weight.float().t() + bias.float()) < BF16_TOLERANCE
    for first, count in ((0, 1), (5, 7), (64, 64), (77, 300), (1000, 1999)):
        own = slice(first, first + count)
        assert torch.equal(kernels.invariant_linear(x[own].contiguous(), weight, bias), whole[own])


@pytest.mark.parametrize("strategy", ["default", "margin", "neg_entropy"])
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("tempers", [False, True])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_samples_are_those_of_the_plain_version(strategy: str, is_cut: bool, tempers: bool, num_shards: int) -> None:
    """Covers the whole vocabulary: greedy rows and drawn ones of all temperatures in one pass, on tp shards."""
    settings = np.array(SAMPLED_ROWS * 8, dtype=np.float32)
    settings[:, 1:] = settings[:, 1:] if is_cut else (1, 0)
    places, size = np.arange(64), 152064 // num_shards
    fields = torch.from_numpy(sampling_fields(settings.T, places // 4 + 3, places, places * 5, 64))
    logits = random(64, 152064, scale=3.0)
    logits[3, 151666] = 99.0  # the mask id
    sampling = Sampling(strategy, 151666, is_sampled=True, is_cut=is_cut, tempers_confidence=tempers)
    plain = sampled_statistics(logits.cpu(), 0, sampling, SamplingRows.of(fields), lambda value: value[None])
    rows = SamplingRows.of(fields.cuda())

    def on_shard(rank: int, gather: Gather) -> Tensor:
        shard = logits[:, rank * size : (rank + 1) * size].contiguous().clone()
        return sampled_of(shard, rank * size, sampling, rows, gather).cpu()

    for found in on_ranks(num_shards, on_shard):
        # Noise is computed in float32 on both: where two tokens' scores are within its rounding, either may win.
        is_same = found[:, 0] == plain[:, 0]
        assert is_same.sum() >= 63 and is_same[settings[:, 0] == 0].all()
        torch.testing.assert_close(found[is_same], plain[is_same], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("is_sampled", "tempers"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("vocab_start", [0, 38016])
def test_classes_are_reduced_as_by_plain_operators(is_sampled: bool, tempers: bool, vocab_start: int) -> None:
    """Covers the whole vocabulary and a shard, with classes of one token and one of nearly all."""
    settings, places = np.array(SAMPLED_ROWS * 8, dtype=np.float32), np.arange(64)
    settings[:, 1:] = 1, 0
    fields = torch.from_numpy(sampling_fields(settings.T, places // 4 + 3, places, places * 5, 64))
    rows, size = SamplingRows.of(fields.cuda()) if is_sampled else None, 38016 if vocab_start else 152064
    logits, class_V = random(64, size, scale=3.0), np.minimum(np.random.default_rng(5).zipf(1.7, size) - 1, 99)
    class_V[-1] = 100
    tiles, sampling = Tiles.of(class_V, 101, logits.device), Sampling("default", 1, tempers_confidence=tempers)
    found = kernels.class_statistics(logits, vocab_start, tiles, sampling, rows)
    wanted = class_statistics(logits.clone(), vocab_start, tiles, sampling, rows)
    # Where two tokens' scores are within the rounding of their noise, either may win.
    is_same = found[..., 0] == wanted[..., 0]
    assert is_same.float().mean() > 0.99
    torch.testing.assert_close(found[is_same], wanted[is_same], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[..., 3:], wanted[..., 3:], rtol=1e-3, atol=1e-3)


def test_tokens_drawn_do_not_depend_on_what_the_confidence_is_of() -> None:
    """Probability and confidence at the least temperature are those of the greedy kernels."""
    settings, places = np.array(SAMPLED_ROWS * 8, dtype=np.float32), np.arange(64)
    rows = SamplingRows.of(torch.from_numpy(sampling_fields(settings.T, places, places, places, 64)).cuda())
    logits, sampling = random(64, 152064, scale=3.0), Sampling("neg_entropy", 151666, is_sampled=True, is_cut=True)
    own, tempered = (
        sampled_of(logits.clone(), 0, sampling._replace(tempers_confidence=tempers), rows, lambda value: value[None])
        for tempers in (False, True)
    )
    assert torch.equal(own[:, 0], tempered[:, 0]) and not torch.equal(own, tempered)
    greedy = kernels.merge_statistics(kernels.head_statistics(logits, 0, sampling)[None], "neg_entropy")
    is_least = torch.from_numpy(settings[:, 0] <= np.float32(MIN_TEMPERATURE)).cuda()
    torch.testing.assert_close(own[is_least, 1:], greedy[is_least, 1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", ["default", "margin", "neg_entropy"])
@pytest.mark.parametrize("num_shards", [1, 4])
def test_shards_merge(strategy: str, num_shards: int) -> None:
    logits = random(20, 4000, scale=5.0).float().cpu()
    shards = logits.split(4000 // num_shards, dim=1)
    sampling = Sampling(strategy, 17)
    statistics = torch.stack([shard_statistics(shard, i * shard.shape[1], sampling) for i, shard in enumerate(shards)])
    merged = kernels.merge_statistics(statistics.cuda(), strategy).cpu()
    torch.testing.assert_close(merged, merge_statistics(statistics, strategy), rtol=1e-5, atol=1e-5)


def test_a_captured_layer_replays_for_other_lengths() -> None:
    """Lengths and positions are read on the device: one graph, two prefixes, each as if launched afresh."""
    num_heads, num_kv_heads, size = DREAM
    table = rotary_table(2048, size, 1e6, torch.device("cuda"))
    pages = shuffled_table(1, 2048 // PAGE_SIZE)
    committed, window = random(2, 32, PAGE_SIZE, num_kv_heads, size), random(2, 64, num_kv_heads, size)
    x, norm_weight = random(64, 3584), random(3584)
    qkv_weight = random(4608, 3584, scale=0.02)
    tiles = torch.zeros((12, RECORD), dtype=torch.int32, device="cuda")
    horizon, position = torch.zeros((2, 64), dtype=torch.int32, device="cuda")

    def layer() -> Tensor:
        normed, summed = kernels.add_rms_norm(x, None, norm_weight, 1e-6)
        qkv = kernels.linear_partials(normed, qkv_weight)
        query = kernels.rope_prewrite(qkv, position, table, window, num_heads=num_heads)
        attended = kernels.window_attention(query, committed, window, table_SP=pages, tiles_N8=tiles, horizon_T=horizon)
        return kernels.add_rms_norm(attended, summed, norm_weight, 1e-6)[0]

    def set_lengths(start: int, *lengths: int) -> None:
        tiles.zero_()
        table = tiles_of([Run(1, length, length, start, start, 0) for length in lengths], 7, 64)
        tiles[: len(table)] = table[: len(tiles)]
        horizon.fill_(start + 60)
        position.copy_(torch.arange(start, start + 64))

    set_lengths(100, 60)
    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for start, lengths in ((100, [60]), (1900, [60]), (700, [20, 5, 30])):
        set_lengths(start, *lengths)
        graph.replay()
        assert torch.equal(captured, layer())
