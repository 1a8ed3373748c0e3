"""Takes an operator that stands for several where it is right and faster on every rank's device.

Both are timed at the size of the largest step that is captured ahead, and captured where steps are: launched one by
one, their times would be the host's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from common.config import DeviceProfile
from common.processes import Mesh
from lopa_ascend.floors import median_seconds
from lopa_ascend.ops import WIDEST_GATE_UP, Ops
from lopa_ascend.selftest.checks import (
    Bench,
    Hang,
    Sizes,
    fused_gate_up,
    fused_kv_write,
    gate_up_inputs,
    kv_write_inputs,
    rotate_and_write,
)
from lopa_ascend.selftest.grades import FAILURES, Grade, Verdict, failed
from lopa_ascend.selftest.ranks import NEVER, most_of_all
from lopa_ascend.variables import CAPTURING, COMPILING

logger = logging.getLogger(__name__)

_REPEATS = 10  # in one graph
Call = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Fusion:
    """inputs: of a step of so many tokens, on the CPU. laid_out: turns what is fixed among those on the device into
    what each of the two calls takes, which no step does. fused, apart: the calls on them."""

    name: str
    taken: Callable[[Ops], Ops]
    check: Callable[[Bench], Verdict]
    inputs: Callable[[Bench, int], list[Tensor]]
    fused: Call
    apart: Call
    lay_out: Callable[[Ops, list[Tensor], bool], list[Tensor]] = lambda ops, given, is_fused: given


def with_faster_fusions(ops: Ops, sizes: Sizes, device: torch.device, mesh: Mesh, profile: DeviceProfile) -> Ops:
    """The operations with the fusions that pay here. A graph compiler fuses by itself, and is given none."""
    for fusion in () if profile.graph.mode in COMPILING else _fusions(sizes, profile):
        if _pays(fusion, ops, sizes, device, mesh, is_captured=profile.graph.mode in CAPTURING):
            ops = fusion.taken(ops)
    return ops


def _fusions(sizes: Sizes, profile: DeviceProfile) -> Iterator[Fusion]:
    if profile.quantization == "w8a8" and 2 * sizes.inner <= WIDEST_GATE_UP:
        yield Fusion(
            "gate and up in one operator", Ops.with_fused_gate_up, fused_gate_up, gate_up_inputs,
            Ops.quant_matmul_swiglu_quant, _gate_up_apart, _lay_out_gate_up,
        )  # fmt: skip
    # Triton-Ascend's kernel norms no heads, and may not be installed.
    if profile.kernels == "auto" and not sizes.has_head_norms and find_spec("triton") is not None:
        write = partial(rotate_and_write, sizes.num_heads)
        yield Fusion(
            "rotation and KV write in one kernel", Ops.with_fused_kv_write, fused_kv_write, kv_write_inputs,
            lambda ops, *given: write(ops.with_fused_kv_write(), *given), write,
        )  # fmt: skip


def _gate_up_apart(ops: Ops, x: Tensor, weight: Tensor, scale_N: Tensor, scale_T: Tensor) -> object:
    return ops.dequant_swiglu_quant(ops.quant_matmul_int32(x, weight, scale_N), scale_N[None], scale_T)


def _lay_out_gate_up(ops: Ops, given: list[Tensor], is_fused: bool) -> list[Tensor]:
    x, weight, *scales = given
    return [x, ops.to_nz(weight[None].contiguous() if is_fused else weight), *scales]


def _pays(
    fusion: Fusion, ops: Ops, sizes: Sizes, device: torch.device, mesh: Mesh, *, is_captured: bool
) -> bool:  # fmt: skip
    bench, told, seconds = Bench(ops, sizes, device), "", [NEVER, NEVER]
    try:
        verdict = fusion.check(Bench(fusion.taken(ops), sizes, device))
        told = verdict.detail
        if verdict.grade is not Grade.WRONG:
            given = [tensor.to(device) for tensor in fusion.inputs(bench, sizes.step_tokens)]
            seconds = [_seconds(fusion, ops, given, is_fused, device, is_captured) for is_fused in (True, False)]
    except Hang:
        raise
    except FAILURES as error:
        told = failed(error).detail
    fused_s, apart_s = most_of_all(seconds, mesh)
    if fused_s == NEVER:
        logger.info("%s: not taken, wrong on some rank (here: %s)", fusion.name, told)
        return False
    logger.info(
        "%s: right (%s), %.3f ms instead of %.3f at %d tokens, %s",
        fusion.name, told, fused_s * 1e3, apart_s * 1e3, sizes.step_tokens, "taken" if fused_s < apart_s else "left",
    )  # fmt: skip
    return fused_s < apart_s


def _seconds(
    fusion: Fusion, ops: Ops, given: list[Tensor], is_fused: bool, device: torch.device, is_captured: bool
) -> float:
    laid_out, call = fusion.lay_out(ops, given, is_fused), fusion.fused if is_fused else fusion.apart

    def work() -> None:
        for _ in range(_REPEATS):
            call(ops, *laid_out)

    work()
    if not is_captured:
        return median_seconds(work, device) / _REPEATS
    from graphs.npu import NpuCapture

    return median_seconds(NpuCapture()(work), device) / _REPEATS
