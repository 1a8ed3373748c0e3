"""The start-up self-test passes where the operators are right, and names the one that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from common.config import DeviceProfile
from common.errors import MissingCapability
from common.processes import Mesh
from lopa_ascend.ops import npu_ops, reference_ops, twins
from lopa_ascend.selftest import Sizes
from lopa_ascend.selftest import examine as selftest
from lopa_ascend.selftest.checks import CHECKS, GRAPH_CHECKS

SMALL = Sizes(width=256, num_heads=2, num_kv_heads=1, inner=128)


def with_wrong(operator: str, spoil: Callable[[Any], Any]) -> Any:
    """The facade over twins of which one computes something else."""
    ops = reference_ops()
    right = getattr(ops._kernels, operator)
    setattr(ops._kernels, operator, lambda *args, **options: spoil(right(*args, **options)))
    return ops


def names_of_wrong(ops: Any) -> list[str]:
    findings = selftest.examine(ops, SMALL, torch.device("cpu"), Mesh(), "eager")
    return [finding.name for finding in findings if not finding.is_right]


def test_the_twins_agree_with_themselves() -> None:
    assert names_of_wrong(reference_ops()) == []


def test_every_operation_of_a_step_is_checked() -> None:
    checked = {name.removesuffix(" of FRACTAL_NZ") for name in CHECKS}
    needed = set(twins.__all__) - {"npu_prefetch", "npu_format_cast", "npu_fused_infer_attention_score"}
    assert len(needed) <= len(checked)


SPOILED: dict[str, tuple[str, Callable[[Any], Any], list[str]]] = {
    "a uniform average": (
        "npu_fused_infer_attention_score_v2",
        lambda result: (result[0].mean(0, keepdim=True).expand_as(result[0]), result[1]),
        ["paged_attention"],
    ),
    "the other half activated": (
        "npu_swiglu",
        lambda result: result.flip(0),
        ["swiglu"],
    ),
    "int8 off by one everywhere": (
        "npu_dynamic_quant",
        lambda result: ((result[0].clamp(max=126) + 1).to(torch.int8), result[1]),
        ["dynamic_quant"],
    ),
    "a scale of another dtype": (
        "npu_add_rms_norm_dynamic_quant",
        lambda result: (*result[:3], result[3].bfloat16(), result[4]),
        ["add_rms_norm_dynamic_quant"],
    ),
    "nothing finite": ("npu_rms_norm", lambda result: (result[0] * torch.nan, result[1]), ["rms_norm"]),
    "an accumulator off by one": (
        "npu_quant_matmul",
        lambda result: result + (1 if result.dtype == torch.int32 else 0),
        ["quant_matmul_int32"],
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_wrong_operator_is_named(case: str) -> None:
    operator, spoil, names = SPOILED[case]
    assert names_of_wrong(with_wrong(operator, spoil)) == names


@pytest.mark.sim
@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("mode", GRAPH_CHECKS)
def test_the_simulated_device_passes_with_graphs(mode: str) -> None:
    findings = list(selftest.examine(npu_ops(), SMALL, torch.device("npu", 0), Mesh(), mode))
    assert [finding for finding in findings if not finding.is_right] == []
    assert findings[-1].name == GRAPH_CHECKS[mode][0]
    assert len(findings) == len(CHECKS) + 1


@pytest.mark.sim
@pytest.mark.usefixtures("npu")
def test_it_runs_alone_at_dream_7b_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = lambda x1, x2: torch.zeros(len(x1), x2.shape[1], dtype=torch.int32)  # noqa: E731
    monkeypatch.setattr(twins.quant, "int8_matmul", zeros)
    profile = DeviceProfile.model_validate(
        {"name": "p", "engine": "lopa_ascend", "device": "npu", "mesh": {"tensor_parallel_size": 4}}
    )
    assert all(finding.is_right for finding in selftest.examine_alone(profile))


@pytest.mark.sim
@pytest.mark.usefixtures("npu")
def test_an_engine_refuses_to_start_on_a_wrong_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = npu_ops()
    monkeypatch.setattr(ops, "swiglu", lambda gate_up: gate_up.chunk(2, -1)[0].contiguous())
    with pytest.raises(MissingCapability, match=r"rank 0: swiglu is wrong here \(difference .* and torch-npu 2.13.0"):
        selftest.require_correct(ops, SMALL, torch.device("npu", 0), Mesh(), "eager")
