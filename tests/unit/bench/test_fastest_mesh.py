"""The mesh that the engine decides on by its device's floors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.bench import fastest_mesh
from common.bench.estimate.cost import estimate_step
from common.bench.estimate.hardware import load_hardware
from common.bench.estimate.scenario import Options, setup_of
from common.checkpoint import check_tensor_parallel, load_model_config
from common.config import DecodeConfig, DeviceProfile, MeshConfig, RunConfig
from common.config.profile import GraphConfig

ROOT = Path(__file__).parents[3]
DREAM = load_model_config(ROOT / "configs" / "models" / "dream_7b")
H200 = {"bytes_per_s": 4.29e12, "flops_per_s": 790e12}
# tp of four H200s, branches -> measured ms of a pass, windows of 64 (scripts/lab/measurements.md).
MEASURED_MS = {(1, 8): 5.01, (2, 8): 4.56, (1, 4): 4.45, (2, 4): 3.79, (4, 4): 3.72}


def profile(mesh: MeshConfig | None = None, **changed: object) -> DeviceProfile:
    usual = {"name": "p", "engine": "lopa_cuda", "device": "cuda", "graph": GraphConfig(mode="cuda_graph")}
    return DeviceProfile.model_validate({**usual, "mesh": mesh or "auto", **changed})


def run(num_lookahead: int) -> RunConfig:
    return RunConfig(model="m", decode=DecodeConfig(num_lookahead=num_lookahead))


def chosen(num_processes: int, num_lookahead: int, **changed: object) -> MeshConfig:
    return fastest_mesh(profile(**changed), run(num_lookahead), DREAM, num_processes, H200)


@pytest.mark.parametrize("num_lookahead", [0, 15])
@pytest.mark.parametrize("num_processes", [1, 4, 16])
def test_the_chosen_mesh_uses_every_process_and_divides_the_heads(num_processes: int, num_lookahead: int) -> None:
    mesh = chosen(num_processes, num_lookahead)
    assert mesh.num_processes == num_processes
    check_tensor_parallel(DREAM, mesh.tensor_parallel_size)


def test_few_branches_share_layers_and_many_share_branches() -> None:
    assert chosen(4, 0).tensor_parallel_size > chosen(4, 15).tensor_parallel_size


@pytest.mark.parametrize(("num_lookahead", "suffix"), [(3, ""), (7, ", k = 7")])
def test_the_mesh_that_was_fastest_on_four_gpus_is_chosen(num_lookahead: int, suffix: str) -> None:
    decodes = json.loads((ROOT / "docs/results/meshes_h200x4.json").read_text(encoding="utf-8"))["tables"]["decodes"]
    step_ms = {row[0]: row[[heading for heading, _ in decodes["columns"]].index("step, ms")] for row in decodes["rows"]}
    mesh = chosen(4, num_lookahead)
    bp, tp = mesh.branch_parallel_size, mesh.tensor_parallel_size
    name = " x ".join(f"{axis} {size}" for axis, size in (("bp", bp), ("tp", tp)) if size > 1)
    assert step_ms[name + suffix] == min(step_ms[f"{each}{suffix}"] for each in ("bp 4", "tp 4", "bp 2 x tp 2"))


@pytest.mark.parametrize(("tp", "branches"), MEASURED_MS)
def test_passes_of_four_gpus_are_predicted_within_a_quarter(tp: int, branches: int) -> None:
    mesh = MeshConfig(branch_parallel_size=4 // tp, tensor_parallel_size=tp)
    setup = setup_of(profile(mesh), run(branches - 1), DREAM, Options(window=64, read_share=1.0))
    step = estimate_step(setup, load_hardware("h200"))
    assert step.without("host", "commit") == pytest.approx(MEASURED_MS[tp, branches], rel=0.25)


def test_a_precision_that_no_file_describes_is_the_measured_one() -> None:
    assert chosen(2, 0, dtype="float32").num_processes == 2
