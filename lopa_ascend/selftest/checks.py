"""The self-test's checks: one call of each operation on the device and of its twin, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.checkpoint import ModelConfig, MoEConfig
from common.errors import EngineError
from common.runtime import wait_until_done
from lopa_ascend.kv import PAGE_SIZE
from lopa_ascend.load import HEAD_SIZE
from lopa_ascend.ops import Ops, Quantized, VirtualRows, reference_ops
from lopa_ascend.selftest.grades import FAILURES, Grade, Verdict, compare, failed

EPSILON = 1e-6
NUM_TOKENS = 48
SCALE = HEAD_SIZE**-0.5
DEADLINE_S = 120.0  # the first call of an operator may compile it


class Hang(EngineError):
    """The device has not answered; nothing else can be asked of it."""


def verdict_of(check: Callable[[], Verdict]) -> Verdict:
    """Return what the check finds; wrong, with what was said, where a call fails. Raises Hang."""
    try:
        return check()
    except Hang:
        raise
    except FAILURES as error:
        return failed(error)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one tensor-parallel rank. num_experts: those of the rank, in mixtures as `moe` describes them.
    step_tokens: of the largest step that is captured ahead, which the collectives are tried at."""

    width: int
    num_heads: int
    num_kv_heads: int
    inner: int
    has_head_norms: bool = False
    moe: MoEConfig | None = None
    num_experts: int = 0
    step_tokens: int = NUM_TOKENS

    @classmethod
    def of(cls, config: ModelConfig, tp_size: int) -> Sizes:
        heads, kv_heads, moe = config.num_heads // tp_size, config.kv_heads_of_rank(tp_size), config.moe
        inner = config.intermediate_size // tp_size
        if moe is None:
            return cls(config.hidden_size, heads, kv_heads, inner, config.qk_norm)
        # Where every layer is a mixture, what dense layers call is checked at an expert's size.
        inner, num_experts = inner or moe.intermediate_size, moe.num_experts // tp_size
        return cls(config.hidden_size, heads, kv_heads, inner, config.qk_norm, moe, num_experts)

    @classmethod
    def of_dream_7b(cls, tp_size: int) -> Sizes:
        return cls(3584, 28 // tp_size, max(1, 4 // tp_size), 18944 // tp_size)


class Bench:
    """Draws inputs, and runs a call on both sides."""

    def __init__(self, ops: Ops, sizes: Sizes, device: torch.device) -> None:
        self.ops, self.sizes, self.device = ops, sizes, device
        self.twins = reference_ops(attention=ops.attention)
        self._generator = torch.Generator().manual_seed(1)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).bfloat16()

    def int8(self, *shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=self._generator, dtype=torch.int8)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator) * 1e-2 + 1e-3

    def permuted(self, count: int) -> Tensor:
        """Return 0 to count - 1 as floats, in a drawn order."""
        return torch.randperm(count, generator=self._generator).float()

    def both(self, call: Callable[..., Any], *inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Results of call(ops, *inputs) on the device and of the twins, flattened, on the CPU."""
        wanted = call(self.twins, *(tensor.clone() for tensor in inputs))
        found = call(self.ops, *(tensor.to(self.device) for tensor in inputs))
        self.finish()
        return [tensor.cpu() for tensor in _flat(found)], list(_flat(wanted))

    def finish(self) -> None:
        """Wait for the device. Raises Hang after the deadline."""
        if self.device.type == "cpu":
            return
        done = torch.Event(self.device)
        done.record()
        try:
            wait_until_done(done, DEADLINE_S)
        except EngineError:
            raise Hang(f"the device has not answered for {DEADLINE_S:g} s") from None


def _flat(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    else:
        for part in result:
            yield from _flat(part)


def _checked(call: Callable[..., Any], inputs: Callable[[Bench], Sequence[Tensor]]) -> Callable[[Bench], Verdict]:
    """Return the check of a call on what `inputs` draws."""
    return lambda bench: compare(*bench.both(call, *inputs(bench)))


def _norm_inputs(bench: Bench, num_summed: int = 2) -> list[Tensor]:
    width = bench.sizes.width
    return [*(bench.normal(NUM_TOKENS, width) for _ in range(num_summed)), bench.normal(width)]


def _static_inputs(bench: Bench) -> list[Tensor]:
    return [bench.normal(NUM_TOKENS, bench.sizes.width), torch.tensor([20.0]), torch.tensor([3.0])]


def _product(bench: Bench, *, is_nz: bool) -> Verdict:
    num_out = (bench.sizes.num_heads + 2 * bench.sizes.num_kv_heads) * HEAD_SIZE
    x, weight = bench.int8(NUM_TOKENS, bench.sizes.width), bench.int8(bench.sizes.width, num_out)
    scales = bench.uniform(num_out), bench.uniform(NUM_TOKENS), bench.uniform(num_out)

    def product(ops: Ops, x: Tensor, weight: Tensor, scale: Tensor, scale_T: Tensor, bias: Tensor) -> Tensor:
        return ops.quant_matmul(x, ops.to_nz(weight) if is_nz else weight, scale, scale_T=scale_T, bias_N=bias)

    return compare(*bench.both(product, x, weight, *scales))


def _product_int32(bench: Bench) -> Verdict:
    width, inner = bench.sizes.width, bench.sizes.inner
    x, weight, scale = bench.int8(NUM_TOKENS, width), bench.int8(width, 2 * inner), bench.uniform(2 * inner)

    def product(ops: Ops, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return ops.quant_matmul_int32(x, ops.to_nz(weight), scale)

    return compare(*bench.both(product, x, weight, scale))


def _activation_inputs(bench: Bench) -> list[Tensor]:
    inner = bench.sizes.inner
    gate_up = torch.round(bench.normal(NUM_TOKENS, 2 * inner).float() * 4e4).int()
    return [gate_up, bench.uniform(1, 2 * inner), bench.uniform(NUM_TOKENS)]


def gate_up_inputs(bench: Bench, num_tokens: int = NUM_TOKENS) -> list[Tensor]:
    width, inner = bench.sizes.width, bench.sizes.inner
    x, weight = bench.int8(num_tokens, width), bench.int8(width, 2 * inner)
    return [x, weight, bench.uniform(2 * inner) * 1e-2, bench.uniform(num_tokens)]


def gate_up_fused(ops: Ops, x: Tensor, weight: Tensor, *scales: Tensor) -> Quantized:
    return ops.quant_matmul_swiglu_quant(x, ops.to_nz(weight[None].contiguous()), *scales)


# Gate and up as one operator against the two that it stands for.
fused_gate_up = _checked(gate_up_fused, gate_up_inputs)


def _rotary(bench: Bench) -> Verdict:
    num_heads, inputs = bench.sizes.num_heads, kv_write_inputs(bench)[:3]
    return compare(*bench.both(lambda ops, *given: ops.split_and_rotate(*given, num_heads), *inputs))


def write_kv(bench: Bench) -> Verdict:
    """Write to scattered slots, some of them on the dummy page."""
    heads = bench.sizes.num_kv_heads
    key, value = (bench.normal(NUM_TOKENS, heads, HEAD_SIZE) for _ in "kv")
    caches = [torch.zeros(4, PAGE_SIZE, heads, HEAD_SIZE).bfloat16() for _ in "kv"]
    slot = (torch.arange(NUM_TOKENS) * 37 % (4 * PAGE_SIZE)).int()

    def write(ops: Ops, *given: Tensor) -> tuple[Tensor, Tensor]:
        ops.write_kv(*given)
        return given[2], given[3]

    found, wanted = bench.both(write, key, value, *caches, slot)
    is_equal = all(torch.equal(have, want) for have, want in zip(found, wanted, strict=True))
    return Verdict(Grade.SAME, "equal") if is_equal else Verdict(Grade.WRONG, "other KV than was written")


def fused_kv_write(bench: Bench) -> Verdict:
    """The kernel of `kernels: triton` against what it stands for: the query, and both caches whole."""
    return compare(*bench.both(partial(rotate_and_write, bench.sizes.num_heads), *kv_write_inputs(bench)))


def kv_write_inputs(bench: Bench, num_tokens: int = NUM_TOKENS) -> list[Tensor]:
    sizes, num_pages = bench.sizes, 4 + num_tokens // PAGE_SIZE
    qkv = bench.normal(num_tokens, (sizes.num_heads + 2 * sizes.num_kv_heads) * HEAD_SIZE)
    angle = torch.rand(num_tokens, 1, HEAD_SIZE // 2).repeat(1, 1, 2)
    caches = [torch.zeros(num_pages, PAGE_SIZE, sizes.num_kv_heads, HEAD_SIZE).bfloat16() for _ in "kv"]
    slot = (torch.arange(num_tokens) * 37 % (num_pages * PAGE_SIZE)).int()  # 37 has no factor of 128
    return [qkv, angle.cos().bfloat16(), angle.sin().bfloat16(), *caches, slot]


def rotate_and_write(num_heads: int, ops: Ops, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    qkv, cos, sin, keys, values, slot = given
    return ops.rotate_and_write(qkv, cos, sin, num_heads, keys, values, slot), keys, values


# Virtual rows as a step has them: (queries, visible positions, pages). They share pages in a cache smaller than the sum
# of their blocks, see beyond 512 keys, and end on, before and after page borders.
ROWS = [(1, 1, [1]), (9, 128, [1]), (8, 129, [1, 2]), (8, 600, [1, 2, 3, 4, 5]), (22, 640, [1, 2, 3, 4, 6])]
LATER = [(1, 5, [1]), (9, 100, [1]), (8, 200, [1, 2]), (8, 513, [1, 2, 3, 4, 5]), (22, 512, [1, 2, 3, 4, 6])]


def virtual_rows(rows: list[tuple[int, int, list[int]]], device: torch.device) -> VirtualRows:
    ends = torch.tensor([count for count, _, _ in rows]).cumsum(0).tolist()
    table = torch.zeros(len(rows), 5, dtype=torch.int32)
    for row, (_, _, pages) in zip(table, rows, strict=True):
        row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
    return VirtualRows(table.to(device), ends, [length for _, length, _ in rows])


def attention_inputs(bench: Bench) -> list[Tensor]:
    query = bench.normal(NUM_TOKENS, bench.sizes.num_heads, HEAD_SIZE)
    return [query, *(bench.normal(7, PAGE_SIZE, bench.sizes.num_kv_heads, HEAD_SIZE) for _ in "kv")]


def attend(ops: Ops, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return ops.paged_attention(query, keys, values, virtual_rows(ROWS, query.device), SCALE)


def attention(bench: Bench) -> Verdict:
    return compare(*bench.both(attend, *attention_inputs(bench)), is_attention=True)


# By the operation of `Ops`; the engine lays every quantized weight out in FRACTAL_NZ.
CHECKS: dict[str, Callable[[Bench], Verdict]] = {
    "rms_norm": _checked(lambda ops, *given: ops.rms_norm(*given, EPSILON), partial(_norm_inputs, num_summed=1)),
    "add_rms_norm": _checked(lambda ops, *given: ops.add_rms_norm(*given, EPSILON), _norm_inputs),
    "add_rms_norm_dynamic_quant": _checked(
        lambda ops, *given: ops.add_rms_norm_dynamic_quant(*given, EPSILON), _norm_inputs
    ),
    "dynamic_quant": _checked(
        lambda ops, x: ops.dynamic_quant(x), lambda bench: [bench.normal(NUM_TOKENS, bench.sizes.num_heads * HEAD_SIZE)]
    ),
    "static_quant": _checked(lambda ops, *given: ops.static_quant(*given), _static_inputs),
    "quant_matmul of plain weights": lambda bench: _product(bench, is_nz=False),
    "quant_matmul": lambda bench: _product(bench, is_nz=True),
    "quant_matmul_int32": _product_int32,
    "dequant_swiglu_quant": _checked(lambda ops, *given: ops.dequant_swiglu_quant(*given), _activation_inputs),
    "swiglu": _checked(lambda ops, x: ops.swiglu(x), lambda bench: [bench.normal(NUM_TOKENS, 2 * bench.sizes.inner)]),
    "split_and_rotate": _rotary,
    "write_kv": write_kv,
    "paged_attention": attention,
}
