"""The start-up self-test passes where the operators are right, tells rounding from being wrong, and names what is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sim.ranks import run_ranks
from torch import Tensor

from common.checkpoint import MoEConfig
from common.config import DeviceProfile
from common.errors import MissingCapability
from common.processes import Mesh
from lopa_ascend.ops import npu_ops, reference_ops, twins
from lopa_ascend.ops.twins.quant import quantize_rows
from lopa_ascend.selftest import Finding, Sizes, checks, examine, examine_alone, heads, require_correct
from lopa_ascend.selftest.checks import CHECKS
from lopa_ascend.selftest.examine import called_operations
from lopa_ascend.selftest.families import IN_8_BITS, family_checks
from lopa_ascend.selftest.grades import Grade
from lopa_ascend.selftest.heads import HEAD_CHECKS, SAMPLING
from lopa_ascend.selftest.in_graphs import GRAPH_CHECKS

SMALL = Sizes(width=256, num_heads=2, num_kv_heads=1, inner=128)
LING = MoEConfig(
    num_experts=16, experts_per_token=4, intermediate_size=64, num_shared_experts=1, num_groups=4, top_groups=2,
    scoring="sigmoid", normalise=True, scaling=2.5, first_dense=1, has_expert_bias=True,
)  # fmt: skip
QWEN = replace(LING, scoring="softmax", num_groups=1, top_groups=1, scaling=1.0, has_expert_bias=False)
EXPERTS = replace(SMALL, has_head_norms=True, moe=LING, num_experts=8)
FAMILY = {"norms of heads", "route", "dispatch", "grouped_matmul", "combine"}
FAMILY_IN_8_BITS = {"norms of heads", "route", "combine", *IN_8_BITS}
WIDE = Sizes(width=3584, num_heads=2, num_kv_heads=1, inner=128)
NUM_FORMS = 4  # of attention, with one KV head
EVERY_SCHEME = ("FLOAT", "W8A8", "W8A8_DYNAMIC")


def with_wrong(operator: str, spoil: Callable[[Any], Any]) -> Any:
    """The facade over twins of which one computes something else."""
    ops = reference_ops()
    right = getattr(ops._kernels, operator)
    setattr(ops._kernels, operator, lambda *args, **options: spoil(right(*args, **options)))
    return ops


def findings_of(ops: Any, sizes: Sizes = SMALL, schemes: tuple[str, ...] = EVERY_SCHEME) -> list[Finding]:
    return list(examine(ops, sizes, torch.device("cpu"), Mesh(), "eager", schemes))


def unlike(ops: Any, sizes: Sizes = SMALL, schemes: tuple[str, ...] = EVERY_SCHEME) -> dict[str, Grade]:
    """Without the forms of attention that are not called."""
    found = [one for one in findings_of(ops, sizes, schemes) if one.is_called or one.name in CHECKS]
    return {one.name: one.grade for one in found if one.grade is not Grade.SAME}


def profile(**settings: Any) -> DeviceProfile:
    return DeviceProfile.model_validate({"name": "p", "engine": "lopa_ascend", "device": "npu", **settings})


@pytest.mark.parametrize("sizes", [SMALL, EXPERTS, replace(EXPERTS, moe=QWEN)], ids=["dense", "sigmoid", "softmax"])
def test_the_twins_agree_with_themselves(sizes: Sizes) -> None:
    assert unlike(reference_ops(), sizes) == {}


def replace_sizes(bench: checks.Bench, sizes: Sizes) -> checks.Bench:
    return checks.Bench(bench.ops, sizes, bench.device)


def test_every_operation_of_a_step_is_checked() -> None:
    assert called_operations(EVERY_SCHEME) == CHECKS.keys() - {"quant_matmul of plain weights"}
    bench = checks.Bench(reference_ops(), EXPERTS, torch.device("cpu"))
    families = {name for name, _ in family_checks(bench)}
    assert {name for name, _ in family_checks(bench, in_8_bits=True)} == FAMILY_IN_8_BITS
    assert families == FAMILY and {name for name, _ in family_checks(replace_sizes(bench, SMALL))} == set()
    checked = {name.partition(" of ")[0] for name in CHECKS} | families
    others = {
        "npu_moe_gating_top_k_softmax",
        "npu_prefetch",
        "npu_format_cast",
        "_npu_reshape_and_cache",
        "npu_fused_infer_attention_score_v2",
    }
    assert len(set(twins.__all__) - others) <= len(checked)


def test_noise_that_does_not_wrap_is_told_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An int32 product that saturates: only steps at temperature > 0 call it."""
    right, places = heads.noise_bits, []

    def saturated_first(*given: Any) -> Tensor:
        places.append(given)
        return right(*given).clamp(max=2**31 - 2) if len(places) > 1 else right(*given).clamp(min=0)

    monkeypatch.setattr(heads, "noise_bits", saturated_first)
    (found,) = (one for one in findings_of(reference_ops()) if one.name == SAMPLING)
    assert found.grade is Grade.WRONG and "integers differ" in found.detail and not found.stops


def test_a_maximum_that_is_not_the_first_of_its_ties_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Tensor.max
    last = SimpleNamespace(indices=torch.full((checks.NUM_TOKENS,), 3999))
    monkeypatch.setattr(
        Tensor, "max", lambda x, *args, **options: last if "dim" in options else right(x, *args, **options)
    )
    verdict = heads.first_of_ties(checks.Bench(reference_ops(), SMALL, torch.device("cpu")))
    assert verdict.grade is Grade.ROUNDS_DIFFERENTLY and "not the first of their ties" in verdict.detail


WRONG, ROUNDS = Grade.WRONG, Grade.ROUNDS_DIFFERENTLY
SPOILED: dict[str, tuple[str, Callable[[Any], Any], dict[str, Grade]]] = {
    "a uniform average": (
        "npu_fused_infer_attention_score",
        lambda result: (result[0].mean(0, keepdim=True).expand_as(result[0]), result[1]),
        {"paged_attention": WRONG},
    ),
    "attention off by a hundredth": (
        "npu_fused_infer_attention_score",
        lambda result: (result[0] + 0.02, result[1]),
        {"paged_attention": ROUNDS},
    ),
    "the other half activated": ("npu_swiglu", lambda result: result.flip(0), {"swiglu": WRONG}),
    "int8 off by one everywhere": (
        "npu_dynamic_quant",
        lambda result: ((result[0].clamp(max=126) + 1).to(torch.int8), result[1]),
        {"dynamic_quant": ROUNDS},
    ),
    "int8 off by two in one place": (
        "npu_dynamic_quant",
        lambda result: (torch.where(torch.arange(result[0].shape[1]) == 5, result[0] // 2, result[0]), result[1]),
        {"dynamic_quant": WRONG},
    ),
    "a scale of another dtype": (
        "npu_add_rms_norm_dynamic_quant",
        lambda result: (*result[:3], result[3].bfloat16(), result[4]),
        {"add_rms_norm_dynamic_quant": WRONG},
    ),
    "a scale rounded to bfloat16": (
        "npu_dynamic_quant",
        lambda result: (result[0], result[1].bfloat16().float()),
        {"dynamic_quant": ROUNDS},
    ),
    "a step too small": (
        "npu_rms_norm",
        lambda result: ((result[0].float() * (1 - 2**-8)).bfloat16(), result[1]),
        {"rms_norm": ROUNDS},
    ),
    "off by three steps": (
        "npu_rms_norm",
        lambda result: ((result[0].float() * (1 + 3 * 2**-7)).bfloat16(), result[1]),
        {"rms_norm": WRONG},
    ),
    "nothing finite": ("npu_rms_norm", lambda result: (result[0] * torch.nan, result[1]), {"rms_norm": WRONG}),
    "an accumulator off by one": (
        "npu_quant_matmul",
        lambda result: result + (1 if result.dtype == torch.int32 else 0),
        {"quant_matmul_int32": WRONG},
    ),
}


# The same for a model with norms of heads and experts.
SPOILED_EXPERTS: dict[str, tuple[str, Callable[[Any], Any], dict[str, Grade]]] = {
    "another expert": (
        "npu_moe_gating_top_k",
        lambda result: (result[0], result[1].roll(1, dims=1), result[2]),
        {"route": WRONG},
    ),
    "weights that are not shares": (
        "npu_moe_gating_top_k",
        lambda result: (result[0] * 1.1, *result[1:]),
        {"route": WRONG},
    ),
    "rows of another expert": (
        "npu_moe_init_routing_v2",
        lambda result: (result[0].roll(1, dims=0), *result[1:]),
        {"dispatch": WRONG},
    ),
    "rows counted from the end": (
        "npu_moe_init_routing_v2",
        lambda result: (*result[:2], result[2].flip(0), result[3]),
        {"dispatch": WRONG},
    ),
    "another expert's weight": ("npu_grouped_matmul", lambda result: [result[0].flip(0)], {"grouped_matmul": WRONG}),
    "a sum without its weights": ("npu_moe_token_unpermute", lambda result: result * 2, {"combine": WRONG}),
}


SPOILED_IN_8_BITS: dict[str, tuple[str, Callable[[Any], Any], set[str]]] = {
    "scales of other rows": (
        "npu_moe_init_routing_v2",
        lambda result: (*result[:3], result[3].roll(1)),
        {"dispatch of int8"},
    ),
    "an accumulator off by one": (
        "npu_grouped_matmul",
        lambda result: [result[0] + 1] if result[0].dtype == torch.int32 else result,
        {"grouped_matmul_int32"},
    ),
    "another row's values": (
        "npu_dequant_swiglu_quant",
        lambda result: (result[0].roll(1, dims=0), result[1]),
        {"dequant_swiglu_quant", "dequant_swiglu_quant of experts"},
    ),
    "a product without a scale": (
        "npu_grouped_matmul",
        lambda result: [result[0] * 2] if result[0].dtype == torch.bfloat16 else result,
        {"grouped_quant_matmul"},
    ),
}


@pytest.mark.parametrize("case", SPOILED_IN_8_BITS)
def test_a_spoiled_operator_of_experts_in_8_bits_is_named(case: str) -> None:
    operator, spoil, names = SPOILED_IN_8_BITS[case]
    assert unlike(with_wrong(operator, spoil), EXPERTS, ("W8A8_DYNAMIC",)) == dict.fromkeys(names, WRONG)


@pytest.mark.slow
@pytest.mark.parametrize("case", SPOILED_EXPERTS)
def test_a_spoiled_operator_of_experts_is_named_and_stops_only_models_that_have_some(case: str) -> None:
    operator, spoil, grades = SPOILED_EXPERTS[case]
    assert unlike(with_wrong(operator, spoil), EXPERTS, ("FLOAT",)) == grades
    assert unlike(with_wrong(operator, spoil), SMALL, ("FLOAT",)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_operator_is_named_and_graded(case: str) -> None:
    operator, spoil, grades = SPOILED[case]
    assert unlike(with_wrong(operator, spoil)) == grades


def _norm_rounded(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """A norm as another tiling of the kernels has it: the sum is rounded, and so is what gamma scales."""
    total = x1 + x2
    inverse = (total.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (total.float() * inverse).bfloat16() * gamma, total


def test_a_tiling_that_rounds_in_between_is_not_wrong() -> None:
    ops = reference_ops()

    def norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, None, Tensor]:
        normed, total = _norm_rounded(x1, x2, gamma, epsilon)
        return normed, None, total

    def norm_quant(x1: Tensor, x2: Tensor, gamma: Tensor, *, epsilon: float, **_: Any) -> tuple[Any, ...]:
        normed, total = _norm_rounded(x1, x2, gamma, epsilon)
        values, scale_T = quantize_rows(normed.float())
        return values, None, total, scale_T, None

    ops._kernels.npu_add_rms_norm, ops._kernels.npu_add_rms_norm_dynamic_quant = norm, norm_quant
    assert unlike(ops, WIDE) == {"add_rms_norm": ROUNDS, "add_rms_norm_dynamic_quant": ROUNDS}


@pytest.mark.parametrize(("scheme", "stops"), [("FLOAT", False), ("W8A8", False), ("W8A8_DYNAMIC", True)])
def test_only_what_the_model_calls_is_in_the_way(scheme: str, stops: bool) -> None:
    ops = with_wrong("npu_dequant_swiglu_quant", lambda result: (result[0].flip(1), result[1]))
    found = {finding.name: finding for finding in findings_of(ops, schemes=(scheme,))}["dequant_swiglu_quant"]
    assert found.is_useless and found.stops is stops
    assert ("not called" in found.sentence) is not stops


def test_a_call_that_fails_is_wrong_and_told() -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Unknown keyword argument\n'cache_mode'")

    ops = reference_ops()
    ops._kernels.npu_scatter_pa_kv_cache = fails
    told = {finding.name: finding.detail for finding in findings_of(ops) if finding.stops}
    assert told == {"write_kv": "Unknown keyword argument 'cache_mode'"}


@pytest.mark.sim
@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("mode", GRAPH_CHECKS)
def test_the_simulated_device_passes_with_graphs(mode: str) -> None:
    findings = list(examine(npu_ops(), SMALL, torch.device("npu", 0), Mesh(), mode, EVERY_SCHEME))
    assert [finding for finding in findings if finding.grade is not Grade.SAME] == []
    assert findings[-1].name == GRAPH_CHECKS[mode][0]
    assert len(findings) == len(CHECKS) + len(HEAD_CHECKS) + NUM_FORMS + 1


@pytest.mark.sim
@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize(
    ("moe", "scheme", "names"),
    [(LING, "FLOAT", FAMILY), (QWEN, "FLOAT", FAMILY), (LING, "W8A8_DYNAMIC", FAMILY_IN_8_BITS)],
)
def test_the_simulated_device_passes_with_experts(moe: MoEConfig, scheme: str, names: set[str]) -> None:
    sizes = replace(EXPERTS, moe=moe)
    findings = list(examine(npu_ops(), sizes, torch.device("npu", 0), Mesh(), "eager", (scheme,)))
    assert [finding for finding in findings if finding.grade is not Grade.SAME] == []
    assert {finding.name for finding in findings if finding.is_called} >= names


@pytest.mark.sim
@pytest.mark.usefixtures("npu")
def test_it_runs_alone_at_dream_7b_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = lambda x1, x2: torch.zeros(len(x1), x2.shape[1], dtype=torch.int32)  # noqa: E731
    monkeypatch.setattr(twins.quant, "int8_matmul", zeros)
    findings = examine_alone(profile(mesh={"tensor_parallel_size": 4}))
    assert {finding.grade for finding in findings} == {Grade.SAME}


@pytest.mark.sim
@pytest.mark.usefixtures("npu")
def test_an_engine_refuses_to_start_on_a_wrong_operator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ops, device = npu_ops(), torch.device("npu", 0)
    monkeypatch.setattr(ops, "swiglu", lambda gate_up: gate_up.chunk(2, -1)[0].contiguous())
    with pytest.raises(MissingCapability, match=r"rank 0: swiglu is wrong here \(off by .* and torch-npu 2\.1"):
        require_correct(ops, SMALL, device, Mesh(), profile(), ("FLOAT",))
    with caplog.at_level(logging.INFO):
        require_correct(ops, SMALL, device, Mesh(), profile(), ("W8A8_DYNAMIC",))
    assert caplog.text.count("-D pages right (equal, ") == NUM_FORMS
    with caplog.at_level(logging.WARNING):
        require_correct(ops, SMALL, device, Mesh(), profile(npu={"selftest": "warn"}), ("FLOAT",))
    assert "swiglu is wrong here" in caplog.text and "going on" in caplog.text
    monkeypatch.setattr(ops, "rms_norm", None)
    require_correct(ops, SMALL, device, Mesh(), profile(npu={"selftest": "off"}), ("FLOAT",))


@pytest.mark.sim
@pytest.mark.usefixtures("npu")
def test_a_device_that_hangs_is_asked_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEADLINE_S", 0.05)
    monkeypatch.setattr(torch, "Event", lambda device: SimpleNamespace(record=lambda: None, query=lambda: False))
    findings = list(examine(npu_ops(), SMALL, torch.device("npu", 0), Mesh(), "eager", ("FLOAT",)))
    assert [(finding.name, finding.stops) for finding in findings] == [("rms_norm", True)]
    assert "has not answered for 0.05 s" in findings[0].detail


@pytest.mark.sim
@pytest.mark.usefixtures("torch_npu")
def test_attention_and_collectives_are_replayed_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """TP2 x BP2; a sum that counts a rank twice is wrong on every rank."""
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AI_CPU")
    for right, spoiled in run_ranks("npu_ranks:replay_with_collectives", world_size=4):
        assert right == [Grade.SAME, "equal (HCCL_OP_EXPANSION_MODE AI_CPU)"]
        assert spoiled == Grade.WRONG


@pytest.mark.sim
@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("is_in_order", [True, False])
def test_sums_of_a_step_s_size_are_told_where_ranks_round_them_differently(is_in_order: bool) -> None:
    grade, told = (Grade.SAME, "equal on all ranks") if is_in_order else (Grade.ROUNDS_DIFFERENTLY, "ranks round the")
    for found, detail in run_ranks("npu_ranks:sums_over_ranks", world_size=4, is_in_order=is_in_order):
        assert found == grade and detail.startswith(told)
        assert detail.endswith("; 200 tokens by an algorithm that ASCEND_MODULE_LOG_LEVEL=HCCL=1 would log")
