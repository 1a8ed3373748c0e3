"""Examines a device before it serves: every operation against its CPU twin at the engine's shapes, attention as the
graph mode runs it, and the collectives of each axis.

Some CANN releases compute wrong results without a word (scripts/lab/ascend_evidence.md names the reports), and no
simulation can tell.
So an engine on npu runs this when it starts, and refuses to go on where an operation that it calls is wrong; what
rounds differently is said and does no harm. `lopa doctor --selftest` runs it alone. Inputs are drawn on the CPU and
copied, so that both sides compute on the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from common.checkpoint import load_model_config
from common.config import DeviceProfile
from common.errors import MissingCapability
from common.processes import Mesh, resolve_mesh
from common.runtime import linear_schemes, scheme_at_load
from lopa_ascend.ops import AttentionForm, Ops, load_torch_npu, npu_ops, open_device
from lopa_ascend.ops.npu import cann_version
from lopa_ascend.selftest.checks import CHECKS, Bench, Hang, Sizes, fused_gate_up, fused_kv_write, verdict_of
from lopa_ascend.selftest.choose import attention_form, forms_of, settle, timed_attention
from lopa_ascend.selftest.families import family_checks
from lopa_ascend.selftest.grades import Grade, Verdict
from lopa_ascend.selftest.heads import HEAD_CHECKS, SAMPLING
from lopa_ascend.selftest.in_graphs import GRAPH_CHECKS, all_reduce, replayed_with_collectives
from lopa_ascend.selftest.remedies import remedy
from lopa_ascend.variables import CAPTURING

_FORMS = "attention "  # each of its forms, whichever is called
_ALWAYS = frozenset({"rms_norm", "add_rms_norm", "split_and_rotate", "write_kv", "paged_attention"})
_BY_SCHEME = {
    "FLOAT": frozenset({"swiglu"}),
    "W8A8": frozenset({"swiglu", "static_quant", "quant_matmul"}),
    "W8A8_DYNAMIC": frozenset(
        {"add_rms_norm_dynamic_quant", "dynamic_quant", "quant_matmul", "quant_matmul_int32", "dequant_swiglu_quant"}
    ),
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finding:
    """detail: the largest difference, or what went wrong. is_called: whether the model that is to run calls it."""

    name: str
    grade: Grade
    detail: str
    is_called: bool = True

    @property
    def is_useless(self) -> bool:
        return self.grade is Grade.WRONG

    @property
    def stops(self) -> bool:
        """Whether it stops a run."""
        return self.is_useless and self.is_called

    @property
    def judgement(self) -> str:
        return f"{'wrong' if self.is_useless else 'right'} ({self.detail})"

    @property
    def sentence(self) -> str:
        told = {Grade.SAME: "", Grade.ROUNDS_DIFFERENTLY: "rounds differently: ", Grade.WRONG: "wrong: "}[self.grade]
        is_harmless = self.is_useless and not self.is_called
        return f"{told}{self.detail}{' (not called by this model)' if is_harmless else ''}"


def require_correct(
    ops: Ops, sizes: Sizes, device: torch.device, mesh: Mesh, profile: DeviceProfile, schemes: Collection[str]
) -> None:
    """Examine the operations. Raises MissingCapability naming operation, difference and CANN where one that is called
    is wrong, unless the profile only wants to be warned.

    schemes: those of the model's linears.
    """
    if profile.npu.selftest == "off":
        return
    mode = profile.graph.mode
    findings = list(examine(ops, sizes, device, mesh, mode, schemes))
    forms = [found for found in findings if found.name.startswith(_FORMS)]
    logger.info("self-test: %s", "; ".join(f"{form.name} {form.judgement}" for form in forms))
    wrong = [finding for finding in findings if finding.stops]
    for finding in wrong:
        sentence = f"rank {mesh.rank}: {finding.name} is wrong here ({finding.detail}), with {versions()}"
        if profile.npu.selftest == "strict":
            raise MissingCapability(f"{sentence}: {remedy(finding.detail)}")
        logger.warning("%s; going on, since the profile has selftest warn", sentence)
    other = [f"{found.name} ({found.detail})" for found in findings if found.grade is Grade.ROUNDS_DIFFERENTLY]
    if other:
        logger.info("self-test: these round differently from their CPU twins: %s", ", ".join(other))
    if not wrong:
        logger.info("self-test: %d operations agree with their CPU twins, with %s", len(findings), versions())


def examine_alone(profile: DeviceProfile, model: str | None = None) -> list[Finding]:
    """Examine this process's first device for `lopa doctor --selftest`, at the model's shapes, else Dream-7B's. Raises
    MissingCapability."""
    open_device(1, 0)
    tp_size, device = resolve_mesh(profile).tensor_parallel_size, torch.device("npu", 0)
    sizes, schemes = Sizes.of_dream_7b(tp_size), {scheme_at_load(profile)}
    if model is not None:
        config = load_model_config(model)
        sizes, schemes = Sizes.of(config, tp_size), set(linear_schemes(profile, model, config).values())
    ops = npu_ops(attention_form(profile, sizes.num_kv_heads))
    ops = settle(ops.with_fused_kv_write() if profile.kernels == "triton" else ops, sizes, device, Mesh(), profile)
    return list(examine(ops, sizes, device, Mesh(), profile.graph.mode, schemes))


def examine(
    ops: Ops, sizes: Sizes, device: torch.device, mesh: Mesh, mode: str, schemes: Collection[str]
) -> Iterator[Finding]:
    """Run every check; ends early where the device hangs, since nothing else can be asked of it then."""
    called = called_operations(schemes)
    for name, check in _checks(Bench(ops, sizes, device), mesh, mode, in_8_bits="W8A8_DYNAMIC" in schemes):
        try:
            verdict = verdict_of(check)
        except Hang as error:
            yield Finding(name, Grade.WRONG, str(error))
            return
        is_called = name in called or not (name in CHECKS or name == SAMPLING or name.startswith(_FORMS))
        yield Finding(name, *verdict, is_called=is_called)


def _checks(bench: Bench, mesh: Mesh, mode: str, *, in_8_bits: bool) -> Iterator[tuple[str, Callable[[], Verdict]]]:
    for name, check in CHECKS.items():
        yield name, partial(check, bench)
    if bench.ops.fuses_kv_write:
        yield "rotate_and_write", partial(fused_kv_write, bench)
    if bench.ops.fuses_gate_up:
        yield "quant_matmul_swiglu_quant", partial(fused_gate_up, bench)
    for name, check in HEAD_CHECKS.items():
        yield name, partial(check, bench)
    for name, check in family_checks(bench, in_8_bits=in_8_bits):
        yield name, partial(check, bench)
    for form in forms_of(bench.sizes):
        yield f"{_FORMS}{form}", partial(_form, bench, form)
    if mode in GRAPH_CHECKS:
        name, check = GRAPH_CHECKS[mode]
        yield name, partial(check, bench)
    for axis, group, size in (("tp", mesh.tp_group, mesh.tp_size), ("bp", mesh.bp_group, mesh.bp_size)):
        if group is not None:
            yield f"all_reduce over {axis}", partial(all_reduce, bench, group, size)
    if mode in CAPTURING and mesh.tp_size * mesh.bp_size > 1:
        yield "a replay of attention and collectives", partial(replayed_with_collectives, bench, mesh)


def _form(bench: Bench, form: AttentionForm) -> Verdict:
    return timed_attention(bench.ops, form, bench.sizes, bench.device)[0]


def versions() -> str:
    return f"CANN {cann_version()} and torch-npu {load_torch_npu().__version__}"


def called_operations(schemes: Collection[str]) -> frozenset[str]:
    """Return the operations that a model calls: only these may stop a run. schemes: those of its decoder layers'
    linears, as common.runtime.linear_schemes names them."""
    return _ALWAYS.union(*(_BY_SCHEME[scheme] for scheme in schemes))
