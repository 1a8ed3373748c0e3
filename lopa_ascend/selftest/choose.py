"""Chooses how operations are called, of several ways that may be wrong or slow on a device."""

from __future__ import annotations

import logging
from typing import cast

import torch

from common.config import DeviceProfile
from common.errors import ConfigError, MissingCapability
from common.processes import Mesh
from lopa_ascend.floors import median_seconds
from lopa_ascend.ops import USUAL_ATTENTION, AttentionForm, AttentionVersion, Ops
from lopa_ascend.selftest.checks import Bench, Sizes, attend, attention, attention_inputs, verdict_of, write_kv
from lopa_ascend.selftest.fuse import with_faster_fusions
from lopa_ascend.selftest.grades import Grade, Verdict
from lopa_ascend.selftest.ranks import NEVER, most_of_all
from lopa_ascend.variables import COMPILING

logger = logging.getLogger(__name__)


def attention_form(profile: DeviceProfile, num_kv_heads: int) -> AttentionForm:
    """The form that the profile names; with `auto` the form to begin with. num_kv_heads: KV heads of a rank. Raises
    ConfigError."""
    if profile.npu.attention == "auto":
        return USUAL_ATTENTION
    if profile.npu.kv_view == "4d" and num_kv_heads > 1:
        raise ConfigError(
            f"profile {profile.name}: kv_view 4d needs one KV head a process, and each has {num_kv_heads}: set "
            "npu.kv_view to 3d, or raise tensor_parallel_size"
        )
    version = cast(AttentionVersion, int(profile.npu.attention[1:]))
    return AttentionForm(version, 4 if profile.npu.kv_view == "4d" else 3)


def forms_of(sizes: Sizes) -> list[AttentionForm]:
    """Every form that ranks of these sizes can call."""
    over_pages_of = (AttentionForm(1, 3), AttentionForm(2, 3), AttentionForm(1, 4), AttentionForm(2, 4))
    return [form for form in over_pages_of if form.view_dims == 3 or sizes.num_kv_heads == 1]


def settle(ops: Ops, sizes: Sizes, device: torch.device, mesh: Mesh, profile: DeviceProfile) -> Ops:
    """The operations in forms that are right on every rank's device. Raises MissingCapability where there is no such
    form.

    KV is written by the older operator where the newer one is wrong or absent; with `attention: auto` the fastest right
    form is taken; operators that stand for several are taken where they are right and faster (`fuse`).
    """
    if profile.npu.selftest != "off":
        ops = _with_right_kv_write(ops, sizes, device, mesh)
    if ops.writes_kv_by_atb and profile.graph.mode in COMPILING:
        raise MissingCapability(
            f"KV is written by _npu_reshape_and_cache here, which graph.mode {profile.graph.mode} cannot keep in "
            "place: set graph.mode to npugraph"
        )
    if profile.npu.attention == "auto":
        ops = _with_fastest_attention(ops, sizes, device, mesh)
    return ops if profile.npu.selftest == "off" else with_faster_fusions(ops, sizes, device, mesh, profile)


def timed_attention(ops: Ops, form: AttentionForm, sizes: Sizes, device: torch.device) -> tuple[Verdict, float]:
    """The grade of a form, and its seconds; `NEVER` where it is wrong. Raises Hang."""
    bench = Bench(ops.with_attention(form), sizes, device)
    verdict = verdict_of(lambda: attention(bench))
    if verdict.grade is Grade.WRONG:
        return verdict, NEVER
    inputs = [tensor.to(device) for tensor in attention_inputs(bench)]
    seconds = median_seconds(lambda: attend(bench.ops, *inputs), device)
    return Verdict(verdict.grade, f"{verdict.detail}, {seconds * 1e3:.3f} ms"), seconds


def _with_right_kv_write(ops: Ops, sizes: Sizes, device: torch.device, mesh: Mesh) -> Ops:
    older, written = ops.with_kv_writes_by_atb(), _kv_written(ops, sizes, device)
    takes_older = False
    if written.grade is Grade.WRONG:
        by_atb = _kv_written(older, sizes, device)
        takes_older = by_atb.grade is not Grade.WRONG
        if not takes_older:
            logger.warning(
                "KV is written right neither by npu_scatter_pa_kv_cache (%s) nor by _npu_reshape_and_cache (%s)",
                written.detail, by_atb.detail,
            )  # fmt: skip
    if not most_of_all([float(takes_older)], mesh)[0]:
        return ops
    logger.warning("npu_scatter_pa_kv_cache does not write KV right here: _npu_reshape_and_cache is called instead")
    return older


def _kv_written(ops: Ops, sizes: Sizes, device: torch.device) -> Verdict:
    return verdict_of(lambda: write_kv(Bench(ops, sizes, device)))


def _with_fastest_attention(ops: Ops, sizes: Sizes, device: torch.device, mesh: Mesh) -> Ops:
    forms, told, seconds = forms_of(sizes), [], []
    for form in forms:
        verdict, taken = timed_attention(ops, form, sizes, device)
        told.append(f"{form} {'wrong' if taken == NEVER else 'right'} ({verdict.detail})")
        seconds.append(taken)
    seconds = most_of_all(seconds, mesh)
    if min(seconds) == NEVER:
        raise MissingCapability(f"rank {mesh.rank}: attention is wrong in every form here: {'; '.join(told)}")
    chosen = forms[seconds.index(min(seconds))]
    logger.info("attention: %s; taken is %s", "; ".join(told), chosen)
    return ops.with_attention(chosen)
