"""Estimated step times: against what was measured on an H200, and consistent in themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from started import lopa
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.bench import Options, tell_schemes
from common.bench.estimate.cost import estimate_step, price
from common.bench.estimate.hardware import Figure, Hardware, hardware_of, load_hardware, others_of
from common.bench.estimate.operations import Collective, Kernel
from common.bench.estimate.record import record_step
from common.bench.estimate.scenario import changes, meshes, setup_of
from common.bench.estimate.schemes import costs_ms
from common.bench.estimate.setup import GROUPED_SWIGLU_COLUMNS, LAUNCHES, Launches, Setup
from common.bench.estimate.tables import report
from common.checkpoint import load_model_config
from common.checkpoint.rules import checkpoint_shapes
from common.config import (
    D2F,
    BlockDiffusion,
    DecodeConfig,
    DeviceProfile,
    FastDllm,
    FastDllmV2,
    MeshConfig,
    RunConfig,
    find_config,
    load_profile,
    load_run,
)
from common.config.profile import GraphConfig
from common.decoding import Sampling
from common.errors import ConfigError
from common.model import merge_statistics, shard_statistics
from common.runtime import num_matrix_weights
from lopa_ascend.ops import WIDEST_GATE_UP
from quant.names import LINEARS

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "model_a"
DREAM_7B = load_model_config(ROOT / "configs" / "models" / "dream_7b")

# One H200, bf16, prefix 1024: library linears, compiled norm, rotation and activation, SDPA, one captured graph, every
# position through the head. (rows, window) -> measured ms; see scripts/lab/estimate.md.
MEASURED_STEPS_MS = {
    (1, 32): 4.99, (1, 64): 5.05, (1, 128): 5.45, (2, 64): 5.46, (4, 64): 7.52, (8, 64): 13.6, (14, 64): 23.5,
    (8, 128): 24.6,
}  # fmt: skip
MEASURED_STRUCTURE = Launches(
    "library linears, SDPA", fuses_swiglu=False, kv_write_kernels=1, splits_keys=False, statistics_kernels=0
)
# The engine itself (scripts/lab/measurements.md): library linears and a separate SwiGLU with 60 % of the positions
# through the head; then tuned kernels with every position through it. No figure of h200.yaml that enters was chosen on
# these.
MEASURED_ENGINE_MS = {
    (1, 32): 4.729, (1, 64): 4.878, (1, 128): 5.308, (2, 64): 5.230, (4, 32): 5.226, (4, 64): 7.391, (8, 64): 12.978,
    (8, 128): 24.680,
}  # fmt: skip
MEASURED_TUNED_MS = {
    "bfloat16": {(1, 32): 3.94, (1, 64): 4.145, (1, 128): 4.80, (4, 32): 4.85, (8, 64): 13.13, (8, 128): 25.11},
    "float8": {(1, 64): 2.93, (1, 128): 3.55, (4, 32): 3.59, (8, 64): 9.38, (8, 128): 17.90},
    "int8": {(1, 64): 2.95, (1, 128): 3.39, (4, 32): 3.46},
}
# bp, tp, rows of a rank, window: two H200s, bf16 (scripts/lab/measurements.md).
MEASURED_MESHES_MS = {
    (2, 1, 1, 32): 4.080, (2, 1, 1, 64): 4.263, (2, 1, 2, 32): 4.455, (2, 1, 2, 64): 5.364,
    (1, 2, 1, 32): 2.427, (1, 2, 1, 64): 2.640, (1, 2, 1, 128): 2.943, (1, 2, 1, 256): 4.251, (1, 2, 4, 64): 4.152,
    (1, 2, 8, 64): 7.197,
}  # fmt: skip
# The best kernel at 64 tokens in us.
MEASURED_LINEARS_US = {
    "bfloat16": {"qkv": 11.0, "o": 9.6, "gate_up": 70.9, "down": 38.3, "head": 261.8},
    "int8": {"qkv": 8.8, "o": 7.2, "gate_up": 41.8, "down": 21.8},
    "float8": {"qkv": 8.6, "o": 6.8, "gate_up": 38.7, "down": 21.5},
}


@pytest.fixture(scope="module")
def h200() -> Hardware:
    return load_hardware("h200")


@pytest.fixture(scope="module")
def ascend() -> Hardware:
    return load_hardware("ascend_910c")


def setup(**changed: object) -> Setup:
    usual = Setup(
        model=DREAM_7B, launches=LAUNCHES["lopa_cuda"], dtype="bfloat16", linear_dtype="bfloat16", tp=1, bp=1,
        num_rows=8, num_requests=1, window=64, prefix=1024, block_size=32, read_share=1.0, tokens_per_step=10.0,
        is_block_causal=False,
    )  # fmt: skip
    return replace(usual, **changed)  # type: ignore[arg-type]


def on_ascend(**changed: object) -> Setup:
    usual = {"launches": LAUNCHES["lopa_ascend"], "linear_dtype": "int8", "is_block_causal": True, "tp": 4, "bp": 4}
    return setup(**{**usual, **changed})


@pytest.mark.parametrize(("rows", "window"), MEASURED_STEPS_MS)
def test_steps_measured_on_an_h200_are_predicted_within_a_quarter(h200: Hardware, rows: int, window: int) -> None:
    step = estimate_step(setup(num_rows=rows, window=window, launches=MEASURED_STRUCTURE), h200)
    assert step.without("host", "commit") == pytest.approx(MEASURED_STEPS_MS[rows, window], rel=0.25)


@pytest.mark.parametrize(("rows", "window"), MEASURED_ENGINE_MS)
def test_the_engines_steps_are_predicted_within_a_quarter(h200: Hardware, rows: int, window: int) -> None:
    launches = replace(LAUNCHES["lopa_cuda"], fuses_swiglu=False)
    step = estimate_step(setup(num_rows=rows, window=window, read_share=0.6, launches=launches), h200)
    assert step.without("host", "commit") == pytest.approx(MEASURED_ENGINE_MS[rows, window], rel=0.25)


@pytest.mark.parametrize(("bp", "tp", "rows", "window"), MEASURED_MESHES_MS)
def test_steps_over_two_gpus_are_predicted_within_a_quarter(
    h200: Hardware, bp: int, tp: int, rows: int, window: int
) -> None:
    step = estimate_step(setup(bp=bp, tp=tp, num_rows=rows * bp, window=window, read_share=0.6), h200)
    measured = MEASURED_MESHES_MS[bp, tp, rows, window]
    assert step.without("host", "commit") == pytest.approx(measured, rel=0.25)


TUNED_STEPS = [(dtype, *shape) for dtype, measured in MEASURED_TUNED_MS.items() for shape in measured]


@pytest.mark.parametrize(("dtype", "rows", "window"), TUNED_STEPS)
def test_the_tuned_kernels_are_predicted_within_a_quarter(h200: Hardware, dtype: str, rows: int, window: int) -> None:
    step = estimate_step(setup(num_rows=rows, window=window, linear_dtype=dtype), h200)
    assert step.without("host", "commit") == pytest.approx(MEASURED_TUNED_MS[dtype][rows, window], rel=0.25)


@pytest.mark.parametrize("dtype", MEASURED_LINEARS_US)
def test_linears_measured_on_an_h200_are_predicted_within_a_quarter(h200: Hardware, dtype: str) -> None:
    stream = record_step(setup(num_rows=1, linear_dtype=dtype))
    linears = {op.part: op for op in stream if isinstance(op, Kernel) and op.kind == "linear"}
    for part, measured in MEASURED_LINEARS_US[dtype].items():
        assert price(linears[part], h200).seconds * 1e6 == pytest.approx(measured, rel=0.25), part


@pytest.mark.parametrize(
    ("collective", "measured_us"),
    [
        (Collective("all-reduce", "all_reduce", 64 * 3584 * 2, 4, 4), 9.5),
        (Collective("gather", "all_gather", 24e3 / 4, 4, 4), 12),
        (Collective("commit", "broadcast", 1.8e6, 4, 4), 21),
        (Collective("commit", "broadcast", 3.6e6, 4, 4), 27),
    ],
)
def test_collectives_measured_on_h200s_are_predicted(
    h200: Hardware, collective: Collective, measured_us: float
) -> None:
    assert price(collective, h200).seconds * 1e6 == pytest.approx(measured_us, rel=0.05)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_weight_is_read_once_by_one_rank(tp: int) -> None:
    kernels = [op for op in record_step(setup(tp=tp)) if isinstance(op, Kernel)]
    assert sum(kernel.weight_bytes for kernel in kernels) == 2 * num_matrix_weights(DREAM_7B) / tp
    flops = sum(kernel.flops for kernel in kernels if kernel.kind == "linear")
    assert flops == 2 * num_matrix_weights(DREAM_7B) / tp * 8 * 64


def test_the_model_is_recorded_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    created = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: created.append(empty(*args, **kwargs)) or created[-1])
    record_step(setup())
    assert created and all(tensor.device.type == "meta" for tensor in created)


def test_a_layer_has_the_kernels_of_its_engine() -> None:
    def names_of(chosen: Setup) -> list[str]:
        stream = record_step(replace(chosen, model=replace(DREAM_7B, num_layers=1)))
        inside = [op for op in stream if op.part not in ("host", "embed", "head", "gather", "commit")]
        return [getattr(op, "name", "") for op in inside]

    assert names_of(setup()) == [
        "add_norm", "linear", "rotary_0", "attend", "merge", "linear", "add_norm", "linear", "linear", "add_norm"
    ]  # fmt: skip
    assert names_of(on_ascend()) == [
        "add_norm", "linear", "rotary_0", "attend", "quantize", "linear", "all_reduce", "add_norm", "linear", "linear",
        "all_reduce", "add_norm",
    ]  # fmt: skip
    apart = LAUNCHES["lopa_ascend"].rotating(in_one_kernel=False).activating(in_one_kernel=False)
    assert names_of(on_ascend(launches=apart)) == [
        "add_norm", "linear", "rotary_0", "rotary_1", "rotary_2", "rotary_3", "write_kv", "attend", "quantize",
        "linear", "all_reduce", "add_norm", "linear", "swiglu", "linear", "all_reduce", "add_norm",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "rotates_in_one", "activates_in_one"),
    [([], True, True), (["kernels=npu"], False, True), (["graph.mode=torchair"], False, False)],
)
def test_ascend_fuses_what_its_profile_leaves_to_the_start(
    settings: list[str], rotates_in_one: bool, activates_in_one: bool
) -> None:
    profile = load_profile(find_config("profiles", "ascend_910c_tp4_bp4"), settings)
    launches = setup_of(profile, RunConfig(model="m"), DREAM_7B, Options()).launches
    assert launches == launches.rotating(in_one_kernel=rotates_in_one).activating(in_one_kernel=activates_in_one)


def test_the_plain_statistics_cost_what_their_operators_move() -> None:
    class Counter(TorchDispatchMode):
        num_kernels, num_bytes = 0, 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if not function.is_view and "scalar_tensor" not in str(function):
                self.num_kernels += 1
                tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
                self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            return result

    logits_NV = torch.empty(100, 38016, dtype=torch.bfloat16, device="meta")
    with Counter() as counter:
        statistics_N6 = shard_statistics(logits_NV, 0, Sampling("neg_entropy", 5))
        merge_statistics(statistics_N6.expand(4, -1, -1), "neg_entropy")
    launches = LAUNCHES["lopa_ascend"]
    assert counter.num_kernels == launches.statistics_kernels
    assert counter.num_bytes / logits_NV.numel() == pytest.approx(launches.statistics_bytes, rel=0.01)


@pytest.mark.slow
def test_the_command_prints_tables(tmp_path: Path) -> None:
    command = ["estimate", "-p", "ascend_910c_tp4_bp4", "dream_7b_dummy"]
    settings = ["--set", f"model={GOLDEN}", "--set", "mesh.tensor_parallel_size=2", "--window", "40", "--tpf", "5"]
    done = lopa(*command, *settings)
    assert done.returncode == 0, done.stderr
    assert "window 40 after 1024" in done.stdout and "at 5 tokens a step" in done.stdout
    refused = lopa(*command, "--hardware", "abacus")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "abacus: no such file, and not one of configs/hardware (ascend_910c, " in refused.stderr


@pytest.mark.parametrize("value", [True, "x", -1])
def test_a_figure_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        Figure.model_validate({"value": value, "quality": "assumed", "source": "s"})


def test_only_full_windows_send_committed_kv() -> None:
    def broadcasts(**changed: object) -> list[Collective]:
        stream = record_step(setup(bp=4, **changed))
        return [op for op in stream if isinstance(op, Collective) and op.name == "broadcast"]

    (broadcast,) = broadcasts()
    assert broadcast.size == 28 * 2 * 32 * 4 * 128 * 2  # all layers' keys and values of a block
    assert broadcast.times == 10 / 32
    assert not broadcasts(is_block_causal=True)


def test_changes_move_the_step_the_way_they_must(ascend: Hardware) -> None:
    before = estimate_step(on_ascend(), ascend).ms
    after = {name: estimate_step(*changed).ms for name, *changed in changes(on_ascend(), ascend)}
    assert after["linears in bfloat16"] > before
    assert after["the head in 8 bits"] < before
    assert after["q, k, v not merged"] > before
    assert after["norm and quantization not fused"] > before
    assert after["all-reduces overlapped (weights prefetched)"] < before
    assert after["head statistics in one pass"] < before
    assert after["launched one by one"] > before
    assert after["split, rotation and KV write in five kernels"] > before
    assert after["gate and up, SwiGLU and quantization in two kernels"] > before
    assert after["attention at the matrix units' full rate"] < before
    assert before - after["the host a step ahead (asynchronous scheduling)"] == pytest.approx(0.2)
    on_cuda = {name: changed for name, changed, _ in changes(setup(), ascend)}
    assert on_cuda["linears in W8A8"].linear_dtype == "int8"
    assert not [name for name in on_cuda if "HCCL" in name or "KV write" in name or "SwiGLU" in name]


def test_a_head_in_eight_bits_reads_half_the_bytes() -> None:
    plain, quantized = (
        next(
            op
            for op in record_step(on_ascend(quantizes_head=is_quantized))
            if op.part == "head" and op.name == "linear"
        )
        for is_quantized in (False, True)
    )
    assert isinstance(plain, Kernel) and isinstance(quantized, Kernel)
    assert quantized.weight_bytes == pytest.approx(plain.weight_bytes / 2, rel=0.01)


def test_experts_in_eight_bits_read_half_the_bytes_and_are_predicted(h200: Hardware) -> None:
    """LLaDA2-mini, one request: scripts/lab/measurements.md."""
    model = load_model_config(ROOT / "configs" / "models" / "llada2_mini")
    setups = {
        dtype: setup(model=model, num_rows=1, window=32, read_share=0.6, is_block_causal=True, linear_dtype=dtype)
        for dtype in ("bfloat16", "int8", "float8")
    }
    bytes_of = {
        dtype: sum(
            op.weight_bytes for op in record_step(one) if isinstance(op, Kernel) and op.name in ("gate_up", "down")
        )
        for dtype, one in setups.items()
    }
    assert bytes_of["int8"] == bytes_of["float8"] == pytest.approx(bytes_of["bfloat16"] / 2, rel=0.01)
    for dtype, ms in (("bfloat16", 5.32), ("int8", 3.34), ("float8", 3.34)):
        assert estimate_step(setups[dtype], h200).without("host", "commit") == pytest.approx(ms, rel=0.25)


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_the_last_layer_ends_for_reads_alone_where_the_engine_does_so(share: float) -> None:
    launches = LAUNCHES["lopa_cuda"]
    reads, everything = (
        [
            op
            for op in record_step(setup(read_share=share, launches=replace(launches, finishes_reads_only=only)))
            if isinstance(op, Kernel) and op.part == "down"
        ]
        for only in (True, False)
    )
    assert reads[:-1] == everything[:-1]
    assert reads[-1].flops == pytest.approx(share * everything[-1].flops, rel=0.1)


def test_prefetching_hides_at_most_the_all_reduces(ascend: Hardware) -> None:
    plain, hiding = (estimate_step(on_ascend(hides_all_reduce=hides), ascend) for hides in (False, True))
    all_reduce_ms = sum(part.seconds for part in plain.parts if part.part == "all-reduce") * 1e3
    assert 0 < plain.ms - hiding.ms <= all_reduce_ms
    assert hiding.weight_bytes == plain.weight_bytes
    capped = estimate_step(on_ascend(hides_all_reduce=True, prefetch_bytes=2.0**18), ascend)
    assert hiding.ms < capped.ms < plain.ms


def test_a_length_update_behind_the_launch_costs_its_first_layer(ascend: Hardware) -> None:
    def lengths_ms(hardware: Hardware, order: str) -> tuple[float, float]:
        step = estimate_step(on_ascend(length_updates=order, is_block_causal=True), hardware)
        layers = ("norms", "qkv", "attention", "o", "all-reduce", "gate_up", "down")
        return step.ms - step.without("lengths"), step.ms - step.without(*layers)

    assert ascend.length_update_us is not None
    layer_ms = ascend.length_update_us.value * 1e-3
    share = on_ascend().length_changes
    assert share == pytest.approx(min(1.0, 2 * 10 / 32))
    assert lengths_ms(ascend, "before")[0] == pytest.approx(28 * layer_ms * share)
    assert lengths_ms(ascend, "after")[0] == pytest.approx(layer_ms * share)
    slow = ascend.model_copy(update={"length_update_us": ascend.length_update_us.model_copy(update={"value": 1000.0})})
    waited_ms, layers_ms = lengths_ms(slow, "after")
    assert waited_ms == pytest.approx((28 - layers_ms * 27 / 28) * share)


@pytest.mark.parametrize(("order", "layers"), [("after", 1), ("before", 28)])
def test_steps_that_keep_their_lengths_record_events(ascend: Hardware, order: str, layers: int) -> None:
    step = estimate_step(on_ascend(length_events=order, tokens_per_step=4.0), ascend)
    assert ascend.length_event_us is not None
    assert step.ms - step.without("lengths") == pytest.approx(layers * ascend.length_event_us.value * 1e-3 * 0.75)


def test_all_reduces_beyond_what_vector_cores_take_cost_ai_cpus_latency(ascend: Hardware) -> None:
    def all_reduces(window: int, is_in_one_order: str, **changed: object) -> tuple[float, float]:
        hccl = {"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_DETERMINISTIC": is_in_one_order}
        step = estimate_step(on_ascend(num_rows=4, window=window, hccl=hccl, **changed), ascend)
        (part,) = (part for part in step.parts if part.part == "all-reduce")
        return part.seconds_of["latency"] * 1e6, part.num_kernels

    assert ascend.ai_cpu_all_reduce_us is not None
    fast, slow = 56 * ascend.all_reduce_us.value, 56 * ascend.ai_cpu_all_reduce_us.value
    for is_in_one_order, most in (("true", 73), ("false", 585)):
        assert all_reduces(most, is_in_one_order)[0] == pytest.approx(fast)
        assert all_reduces(most + 1, is_in_one_order)[0] == pytest.approx(slow)
        assert all_reduces(most + 1, is_in_one_order, cuts_all_reduces=True) == pytest.approx((2 * fast, 2 * 56))


def test_the_determinism_estimated_is_the_profiles() -> None:
    found = []
    for value in ("true", "false"):
        settings = [f"environment.HCCL_DETERMINISTIC={value}"]
        profile = load_profile(find_config("profiles", "ascend_910c_tp4_bp4"), settings)
        found.append(setup_of(profile, RunConfig(model="m"), DREAM_7B, Options()).most_aiv_bytes)
    assert found == [512 * 2**10, 4 * 2**20]


@pytest.mark.parametrize(("tp", "num_kernels"), [(2, 2), (4, 1)])
def test_a_product_activates_gate_and_up_where_its_columns_fit(tp: int, num_kernels: int) -> None:
    stream = record_step(on_ascend(tp=tp, model=replace(DREAM_7B, num_layers=1)))
    kernels = [op for op in stream if isinstance(op, Kernel) and op.part == "gate_up"]
    assert len(kernels) == num_kernels
    assert GROUPED_SWIGLU_COLUMNS == WIDEST_GATE_UP
    int32 = 2 * 64 * 2 * DREAM_7B.intermediate_size // tp * 4
    assert (kernels[0].written == int32) == (num_kernels == 2)


def test_a_device_described_twice_is_estimated_by_both() -> None:
    ours, (theirs,) = load_hardware("ascend_910c"), others_of(load_hardware("ascend_910c")).values()
    assert others_of(theirs) == {"ascend_910c": ours} and not others_of(load_hardware("h200"))
    text = report(on_ascend(), ours)
    assert f"({estimate_step(on_ascend(), theirs).ms:.2f} by ascend_910c_msmodeling)" in text.splitlines()[0]


def test_hops_are_paid_by_the_ring() -> None:
    theirs = load_hardware("ascend_910c_msmodeling")
    seconds = price(Collective("all-reduce", "all_reduce", 0, 4, 4), theirs).seconds
    assert seconds * 1e6 == pytest.approx(10 + 6 * 0.5)


def test_the_report_says_what_a_step_s_time_goes_to(ascend: Hardware) -> None:
    step = estimate_step(on_ascend(), ascend)
    assert sum(step.seconds_of.values()) * 1e3 == pytest.approx(step.ms)
    first = report(on_ascend(), ascend).partition("goes to |")[2].splitlines()[2]
    assert "memory: " in first and next(iter(step.seconds_of)) == "memory"


def test_lengths_are_written_for_captured_steps_alone() -> None:
    orders = []
    for mode in ("npugraph", "torchair", "eager"):
        profile = load_profile(find_config("profiles", "ascend_910c_tp2_bp8"), [f"graph.mode={mode}"])
        found = setup_of(profile, RunConfig(model="m"), DREAM_7B, Options())
        orders.append(found.length_updates)
        assert (found.tp, found.bp) == (2, 8)
    assert orders == ["after", None, None]


def test_a_profile_that_prefetches_is_estimated_so() -> None:
    profile = load_profile(find_config("profiles", "ascend_910c_tp4_bp4"), ["npu.weight_prefetch_mb=18"])
    found = setup_of(profile, RunConfig(model="m"), DREAM_7B, Options())
    assert (found.hides_all_reduce, found.prefetch_bytes) == (True, 18 * 2**20)


def test_meshes_are_those_that_the_model_can_be_cut_for(h200: Hardware) -> None:
    assert [(mesh.bp, mesh.tp) for mesh in meshes(on_ascend())] == [(16, 1), (8, 2), (4, 4)]
    small, large = (
        {mesh.tp: estimate_step(mesh, h200).ms for mesh in meshes(setup(bp=4, num_rows=rows))} for rows in (1, 16)
    )
    assert min(small, key=lambda tp: small[tp]) == 4  # one branch: the weights are what takes time
    assert min(large, key=lambda tp: large[tp]) == 1


def test_parts_add_up_and_name_their_limit(ascend: Hardware) -> None:
    step = estimate_step(on_ascend(), ascend)
    limits = {part.part: part.limit for part in step.parts}
    assert sum(part.seconds for part in step.parts) * 1e3 == pytest.approx(step.ms)
    assert (limits["host"], limits["all-reduce"], limits["gate_up"]) == ("host", "latency", "memory")
    assert step.tokens_per_s == pytest.approx(10 / step.ms * 1e3)


def profile(**changed: object) -> DeviceProfile:
    usual: dict[str, object] = {"name": "p", "engine": "lopa_cuda", "device": "cuda", "graph": {"mode": "cuda_graph"}}
    return DeviceProfile.model_validate(usual | changed)


def test_defaults_come_from_profile_and_run() -> None:
    run = RunConfig(model="m", decode=DecodeConfig(num_lookahead=13), max_num_requests=2)
    found = setup_of(profile(mesh={"branch_parallel_size": 4}, quantization="fp8"), run, DREAM_7B, Options())
    assert (found.num_rows, found.rows, found.window, found.prefix) == (28, 7, 96, 1024)
    assert (found.linear_dtype, found.launches, found.is_captured) == ("float8", LAUNCHES["lopa_cuda"], True)
    chosen = setup_of(profile(graph={"mode": "eager"}), run, DREAM_7B, Options(rows=3, window=40, prefix=7))
    assert (chosen.num_rows, chosen.window, chosen.prefix, chosen.is_captured) == (3, 40, 7, False)


@pytest.mark.parametrize(
    ("decode", "window", "prefix"),
    [
        ({"strategy": "vanilla"}, 1024 + 256, 0),
        ({"strategy": "fast_dllm"}, (256 + 32) // 2, 1024),
        ({"strategy": {"name": "fast_dllm", "cache": "dual"}}, 32, 1024),
        ({"max_new_tokens": 64}, 64, 1024),
    ],
)
def test_windows_are_those_of_the_strategy(decode: dict[str, object], window: int, prefix: int) -> None:
    run = RunConfig(model="m", decode=DecodeConfig.model_validate(decode))
    found = setup_of(profile(), run, DREAM_7B, Options())
    assert (found.window, found.prefix) == (window, prefix)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"mesh": "auto"}, "mesh auto is decided on the machine"),
        ({"mesh": MeshConfig(tensor_parallel_size=3)}, "tensor_parallel_size 3 does not divide"),
        ({"device": "cpu", "graph": GraphConfig()}, "describes device cpu: name one with --hardware"),
        ({"dtype": "float32"}, "float32 is not described"),
        ({"mesh": MeshConfig(branch_parallel_size=8192)}, "links of up to 4096 devices are described"),
    ],
)
def test_what_cannot_be_estimated_is_one_sentence(changed: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        own = profile(**changed)
        estimate_step(setup_of(own, RunConfig(model="m"), DREAM_7B, Options()), hardware_of(own))


@pytest.mark.parametrize(
    "changed",
    [
        {"num_lookahead": 1000, "block_size": 10**11, "max_new_tokens": 10**11},
        {"block_size": 10**14, "max_new_tokens": 10**14},
    ],
)
def test_a_step_beyond_any_device_is_one_sentence(changed: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="more than any device computes in a step: lower"):
        setup_of(profile(), RunConfig(model="m", decode=DecodeConfig(**changed)), DREAM_7B, Options())


def test_the_report_names_what_it_takes_on_trust(h200: Hardware, ascend: Hardware) -> None:
    text = report(on_ascend(), ascend)
    assert "PREDICTION FROM UNVERIFIED FIGURES" in text
    assert "- unverified: all_reduce_us 15" in text
    assert "- assumed: vector_kernel_us" in text
    assert "| bp 16 x tp 1 |" in text
    on_h200 = report(setup(), h200)
    assert "memory_tb_s" not in on_h200.partition("Not measured")[2]
    assert "PREDICTION" not in on_h200 and "arranged otherwise" not in on_h200


def test_nothing_on_the_910c_is_called_measured(ascend: Hardware) -> None:
    assert not [name for name, figure in ascend.figures() if figure.quality == "measured"]


def test_the_golden_models_can_be_estimated_too(h200: Hardware) -> None:
    tiny = load_model_config(GOLDEN)
    kernels = [op for op in record_step(setup(model=tiny)) if isinstance(op, Kernel)]
    shapes = checkpoint_shapes(tiny)
    linears = [shape for name, shape in shapes.items() if len(shape) == 2 and "embed" not in name]
    assert sum(kernel.weight_bytes for kernel in kernels) == 2 * sum(a * b for a, b in linears)


def schemes(**counts: int) -> dict[str, str]:
    """28 layers, dynamic but for the first linears of the kinds named."""
    found = {f"layers.{layer}.{kind}": "W8A8_DYNAMIC" for layer in range(28) for kind in LINEARS}
    for name, count in counts.items():
        kind, _, scheme = name.partition("__")
        found.update({f"layers.{layer}.{kind}": scheme for layer in range(count)})
    return found


def test_what_is_not_dynamic_is_told_with_its_cost() -> None:
    profile = load_profile(find_config("profiles", "ascend_910c_tp4_bp4"))
    run = load_run(find_config("runs", "first_910c"))
    config = load_model_config(run.model)
    assert tell_schemes(profile, run, config, schemes()) == (
        "112 linears of decoder layers: 112 dynamic, 0 static, 0 float"
    )
    told = tell_schemes(profile, run, config, schemes(down_proj__FLOAT=28, qkv_proj__W8A8=28))
    assert told.startswith(
        "112 linears of decoder layers: 56 dynamic, 28 static, 28 float; by lopa estimate float ones"
    )
    some, all_ = (costs_ms(profile, run, config, schemes(down_proj__FLOAT=count)) for count in (14, 28))
    assert 0 < some["float"] == pytest.approx(all_["float"] / 2) and some["static"] == 0
    everything = dict.fromkeys(schemes(), "FLOAT")
    both = profile, profile.model_copy(update={"quantization": None})
    int8, floats = (estimate_step(setup_of(one, run, config, Options()), hardware_of(one)) for one in both)
    assert costs_ms(profile, run, config, everything)["float"] == pytest.approx(floats.ms - int8.ms)


def test_a_device_without_figures_has_no_estimate() -> None:
    run = load_run(find_config("runs", "first_910c"))
    cpu, config = load_profile(find_config("profiles", "cpu")), load_model_config(run.model)
    told = tell_schemes(cpu, run, config, schemes(o_proj__FLOAT=1))
    assert told.startswith("112 linears of decoder layers: 111 dynamic, 0 static, 1 float (no estimate: ")


@pytest.mark.parametrize(
    ("strategy", "window"),
    [
        (D2F(), 24), (FastDllm(), 36), (FastDllm(cache="dual"), 8), (BlockDiffusion(), 8), (FastDllmV2(), 8),
        (FastDllmV2(cache="dual"), 8),
    ],
    ids=str,
)  # fmt: skip
def test_the_usual_window_is_the_strategys(strategy: Any, window: int) -> None:
    decode = DecodeConfig(strategy=strategy, block_size=8, max_new_tokens=64)
    profile = DeviceProfile(name="test", engine="lopa_cuda", device="cuda", mesh=MeshConfig(), max_model_len=2048)
    run = RunConfig(model="m", decode=decode)
    assert setup_of(profile, run, load_model_config(GOLDEN), Options()).window == window
