"""The self-test's checks: one call of each operation on the device and of its twin, and how far apart they may be.

Tolerances are those of docs/ascend.md: int8 off by one at ties, scales to 1e-5, bfloat16 results to 2^-7, attention to
4e-3 for values of unit variance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.checkpoint import ModelConfig
from lopa_ascend.kv import PAGE_SIZE
from lopa_ascend.load import HEAD_SIZE
from lopa_ascend.ops import Ops, VirtualRows, lower_attention, reference_ops

EPSILON = 1e-6
NUM_TOKENS = 48
SCALE = HEAD_SIZE**-0.5
INT8_SHARE = 1e-3  # of int8 values may be off by one: ties
BFLOAT16 = 2.0**-7
FLOAT32 = 1e-5
ATTENTION = 4e-3  # absolute


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one tensor-parallel rank."""

    width: int
    num_heads: int
    num_kv_heads: int
    inner: int

    @classmethod
    def of(cls, config: ModelConfig, tp_size: int) -> Sizes:
        heads, kv_heads = config.num_heads // tp_size, config.num_kv_heads // tp_size
        return cls(config.hidden_size, heads, kv_heads, config.intermediate_size // tp_size)

    @classmethod
    def of_dream_7b(cls, tp_size: int) -> Sizes:
        return cls(3584, 28 // tp_size, max(1, 4 // tp_size), 18944 // tp_size)


class Bench:
    """Draws inputs, and runs a call on both sides."""

    def __init__(self, ops: Ops, sizes: Sizes, device: torch.device) -> None:
        self.ops, self.sizes, self.device = ops, sizes, device
        self.twins = reference_ops(attention_version=ops.attention_version)
        self._generator = torch.Generator().manual_seed(1)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).bfloat16()

    def int8(self, *shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=self._generator, dtype=torch.int8)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator) * 1e-2 + 1e-3

    def both(self, call: Callable[..., Any], *inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Results of call(ops, *inputs) on the device and of the twins, flattened, on the CPU."""
        found = call(self.ops, *(tensor.to(self.device) for tensor in inputs))
        wanted = call(self.twins, *(tensor.clone() for tensor in inputs))
        return [tensor.cpu() for tensor in _flat(found)], list(_flat(wanted))


def _flat(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    else:
        for part in result:
            yield from _flat(part)


def compare(found: list[Tensor], wanted: list[Tensor], tolerance: float, absolute: float = 0.0) -> str:
    """The largest difference over what is tolerated. int8 may be off by one in few places, integers beside must be
    equal."""
    told = []
    for have, want in zip(found, wanted, strict=True):
        assert have.shape == want.shape and have.dtype == want.dtype, f"{have.dtype}{list(have.shape)} came back"
        if have.dtype == torch.int8:
            told.append(_compare_int8(have, want))
        elif not have.dtype.is_floating_point:
            num_wrong = int((have != want).sum())
            assert num_wrong == 0, f"{num_wrong} of {have.numel()} integers differ"
        else:
            limit = FLOAT32 if have.dtype == torch.float32 else tolerance
            told.append(_compare_floats(have.double(), want.double(), limit, absolute))
    return ", ".join(told) or "equal"


def _compare_int8(have: Tensor, want: Tensor) -> str:
    difference = (have.int() - want.int()).abs()
    share = float((difference > 0).float().mean())
    assert int(difference.max()) <= 1 and share <= INT8_SHARE, f"int8 off by {int(difference.max())} in {share:.2%}"
    return f"int8 off by one in {share:.3%}"


def _compare_floats(have: Tensor, want: Tensor, relative: float, absolute: float) -> str:
    assert bool(have.isfinite().all()), "the result is not finite"
    scale = want.abs() + want.square().mean().sqrt()  # small values beside large ones are judged by the large
    excess = float(((have - want).abs() - absolute).clamp(min=0).div(scale).max())
    assert excess <= relative, (
        f"difference {float((have - want).abs().max()):.3g}, {excess / relative:.1f} times too much"
    )
    return f"{excess / relative:.0%} of the tolerance"


def _norms(bench: Bench) -> str:
    width = bench.sizes.width
    x, gamma = bench.normal(NUM_TOKENS, width), bench.normal(width)
    return compare(*bench.both(lambda ops, x, gamma: ops.rms_norm(x, gamma, EPSILON), x, gamma), BFLOAT16)


def _add_norm(bench: Bench) -> str:
    width = bench.sizes.width
    inputs = bench.normal(NUM_TOKENS, width), bench.normal(NUM_TOKENS, width), bench.normal(width)
    return compare(*bench.both(lambda ops, *given: ops.add_rms_norm(*given, EPSILON), *inputs), BFLOAT16)


def _add_norm_quant(bench: Bench) -> str:
    width = bench.sizes.width
    inputs = bench.normal(NUM_TOKENS, width), bench.normal(NUM_TOKENS, width), bench.normal(width)
    return compare(*bench.both(lambda ops, *given: ops.add_rms_norm_dynamic_quant(*given, EPSILON), *inputs), BFLOAT16)


def _dynamic_quant(bench: Bench) -> str:
    x = bench.normal(NUM_TOKENS, bench.sizes.num_heads * HEAD_SIZE)
    return compare(*bench.both(lambda ops, x: ops.dynamic_quant(x), x), BFLOAT16)


def _static_quant(bench: Bench) -> str:
    x, scale, offset = bench.normal(NUM_TOKENS, bench.sizes.width), torch.tensor([20.0]), torch.tensor([3.0])
    return compare(*bench.both(lambda ops, *given: ops.static_quant(*given), x, scale, offset), BFLOAT16)


def _product(bench: Bench, *, is_nz: bool) -> str:
    num_out = (bench.sizes.num_heads + 2 * bench.sizes.num_kv_heads) * HEAD_SIZE
    x, weight = bench.int8(NUM_TOKENS, bench.sizes.width), bench.int8(bench.sizes.width, num_out)
    scales = bench.uniform(num_out), bench.uniform(NUM_TOKENS), bench.uniform(num_out)

    def product(ops: Ops, x: Tensor, weight: Tensor, scale: Tensor, scale_T: Tensor, bias: Tensor) -> Tensor:
        return ops.quant_matmul(x, ops.to_nz(weight) if is_nz else weight, scale, scale_T=scale_T, bias_N=bias)

    return compare(*bench.both(product, x, weight, *scales), BFLOAT16)


def _product_int32(bench: Bench) -> str:
    width, inner = bench.sizes.width, bench.sizes.inner
    x, weight, scale = bench.int8(NUM_TOKENS, width), bench.int8(width, 2 * inner), bench.uniform(2 * inner)

    def product(ops: Ops, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return ops.quant_matmul_int32(x, ops.to_nz(weight), scale)

    return compare(*bench.both(product, x, weight, scale), BFLOAT16)


def _dequant_swiglu_quant(bench: Bench) -> str:
    inner = bench.sizes.inner
    gate_up = torch.round(bench.normal(NUM_TOKENS, 2 * inner).float() * 4e4).int()
    inputs = gate_up, bench.uniform(1, 2 * inner), bench.uniform(NUM_TOKENS)
    return compare(*bench.both(lambda ops, *given: ops.dequant_swiglu_quant(*given), *inputs), BFLOAT16)


def _swiglu(bench: Bench) -> str:
    gate_up = bench.normal(NUM_TOKENS, 2 * bench.sizes.inner)
    return compare(*bench.both(lambda ops, x: ops.swiglu(x), gate_up), BFLOAT16)


def _rotary(bench: Bench) -> str:
    sizes = bench.sizes
    qkv = bench.normal(NUM_TOKENS, (sizes.num_heads + 2 * sizes.num_kv_heads) * HEAD_SIZE)
    angle = torch.rand(NUM_TOKENS, 1, HEAD_SIZE // 2).repeat(1, 1, 2)
    inputs = qkv, angle.cos().bfloat16(), angle.sin().bfloat16()
    return compare(*bench.both(lambda ops, *given: ops.split_and_rotate(*given, sizes.num_heads), *inputs), BFLOAT16)


def _write_kv(bench: Bench) -> str:
    """To scattered slots, some of them on the dummy page."""
    heads = bench.sizes.num_kv_heads
    key, value = (bench.normal(NUM_TOKENS, heads, HEAD_SIZE) for _ in "kv")
    caches = [torch.zeros(4, PAGE_SIZE, heads, HEAD_SIZE).bfloat16() for _ in "kv"]
    slot = (torch.arange(NUM_TOKENS) * 37 % (4 * PAGE_SIZE)).int()

    def write(ops: Ops, *given: Tensor) -> tuple[Tensor, Tensor]:
        ops.write_kv(*given)
        return given[2], given[3]

    found, wanted = bench.both(write, key, value, *caches, slot)
    assert all(torch.equal(have, want) for have, want in zip(found, wanted, strict=True)), "other KV than was written"
    return "equal"


# Virtual rows as a step has them: (queries, visible positions, pages). They share pages in a cache smaller than the sum
# of their blocks, see beyond 512 keys, and end on, before and behind page borders.
ROWS = [(1, 1, [1]), (9, 128, [1]), (8, 129, [1, 2]), (8, 600, [1, 2, 3, 4, 5]), (22, 640, [1, 2, 3, 4, 6])]
LATER = [(1, 5, [1]), (9, 100, [1]), (8, 200, [1, 2]), (8, 513, [1, 2, 3, 4, 5]), (22, 512, [1, 2, 3, 4, 6])]


def _virtual_rows(rows: list[tuple[int, int, list[int]]], device: torch.device) -> VirtualRows:
    ends = torch.tensor([count for count, _, _ in rows]).cumsum(0).tolist()
    table = torch.zeros(len(rows), 5, dtype=torch.int32)
    for row, (_, _, pages) in zip(table, rows, strict=True):
        row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
    return VirtualRows(table.to(device), ends, [length for _, length, _ in rows])


def _attention_inputs(bench: Bench) -> list[Tensor]:
    query = bench.normal(NUM_TOKENS, bench.sizes.num_heads, HEAD_SIZE)
    return [query, *(bench.normal(7, PAGE_SIZE, bench.sizes.num_kv_heads, HEAD_SIZE) for _ in "kv")]


def _attention(bench: Bench) -> str:
    def attend(ops: Ops, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return ops.paged_attention(query, keys, values, _virtual_rows(ROWS, query.device), SCALE)

    return compare(*bench.both(attend, *_attention_inputs(bench)), BFLOAT16, ATTENTION)


def replayed_attention(bench: Bench) -> str:
    """Captured at one set of lengths and replayed at another, twice: with the update of its tasks and without."""
    from graphs.npu import NpuCapture

    inputs, capture = _attention_inputs(bench), NpuCapture()
    query, keys, values = (tensor.to(bench.device) for tensor in inputs)
    rows, later = (_virtual_rows(rows, bench.device) for rows in (ROWS, LATER))
    result = torch.zeros_like(query)
    capture.lengths = bench.ops.attention_lengths(rows)

    def work() -> None:
        result.copy_(bench.ops.paged_attention(query, keys, values, rows, SCALE))

    replay = capture(work)
    capture.lengths = bench.ops.attention_lengths(later)
    wanted = bench.twins.paged_attention(*inputs, _virtual_rows(LATER, torch.device("cpu")), SCALE)
    for _ in range(2):
        result.zero_()
        replay()
        told = compare([result.cpu()], [wanted], BFLOAT16, ATTENTION)
    return told


class _Attention(nn.Module):
    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self._ops = ops

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, rows: VirtualRows) -> Tensor:
        return self._ops.paged_attention(query, keys, values, rows, SCALE)


def lowered_attention(bench: Bench) -> str:
    """In a GE graph that is compiled once and run at two sets of lengths."""
    from graphs.npu import Torchair

    lower_attention()
    inputs = _attention_inputs(bench)
    on_device = [tensor.to(bench.device) for tensor in inputs]
    attend, told = Torchair()(_Attention(bench.ops), "selftest"), []
    for rows in (ROWS, LATER):
        found = attend(*on_device, _virtual_rows(rows, bench.device).as_inputs())
        wanted = bench.twins.paged_attention(*inputs, _virtual_rows(rows, torch.device("cpu")), SCALE)
        told.append(compare([found.cpu()], [wanted], BFLOAT16, ATTENTION))
    return told[-1]


def all_reduce(group: dist.ProcessGroup, size: int, width: int, device: torch.device) -> str:
    x = torch.full((NUM_TOKENS, width), float(dist.get_rank(group) + 1), dtype=torch.bfloat16, device=device)
    dist.all_reduce(x, group=group)
    wanted = size * (size + 1) / 2
    assert bool((x == wanted).all()), f"the sum over {size} ranks is {float(x.flatten()[0])}, not {wanted}"
    return "equal"


# What graph.mode adds.
GRAPH_CHECKS: dict[str, tuple[str, Callable[[Bench], str]]] = {
    "npugraph": ("a replay of paged_attention", replayed_attention),
    "npugraph_ex": ("a replay of paged_attention", replayed_attention),
    "torchair": ("paged_attention in a GE graph", lowered_attention),
}

CHECKS: dict[str, Callable[[Bench], str]] = {
    "rms_norm": _norms,
    "add_rms_norm": _add_norm,
    "add_rms_norm_dynamic_quant": _add_norm_quant,
    "dynamic_quant": _dynamic_quant,
    "static_quant": _static_quant,
    "quant_matmul": lambda bench: _product(bench, is_nz=False),
    "quant_matmul of FRACTAL_NZ": lambda bench: _product(bench, is_nz=True),
    "quant_matmul_int32": _product_int32,
    "dequant_swiglu_quant": _dequant_swiglu_quant,
    "swiglu": _swiglu,
    "split_and_rotate": _rotary,
    "write_kv": _write_kv,
    "paged_attention": _attention,
}
