"""What a user starts on a node, on simulated devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import DeviceProfile
from common.config.files import load_run
from common.generate import build_generator
from tests.distributed.ascend_launch import write_model

ROOT = Path(__file__).parents[2]
PROFILE = "ascend_910c_tp4_bp4"
ONE_DEVICE = ["--set", "mesh.tensor_parallel_size=1", "--set", "mesh.branch_parallel_size=1"]


def start(*command: str, timeout_s: float = 400, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)


def machine(torch_npu: Any) -> dict[str, str]:
    paths = [ROOT / "tests" / "npu" / "machine", ROOT, Path(torch_npu.__file__).parents[1]]
    return {"LOPA_SIM_MACHINE": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}


@pytest.mark.sim
@pytest.mark.slow
def test_a_batch_runs_from_the_script_to_the_results(torch_npu: Any, tmp_path: Path) -> None:
    """The profile's own environment, self-test, W8A8, captured graphs, paged KV: the demo model's answers are those of
    the ref lane."""
    output = tmp_path / "o.jsonl"
    run = ["decode.num_lookahead=3", "input.limit=2", f"output.path={output}"]
    graph = ["graph.mode=npugraph", "graph.token_buckets=[128]", "graph.row_buckets=[16]"]  # one shape to capture
    options = [part for setting in [*run, *graph] for part in ("--set", setting)]
    done = start("scripts/run_batch.sh", PROFILE, "demo_block_causal", *ONE_DEVICE, *options, **machine(torch_npu))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "operations agree with their CPU twins, with CANN" in done.stderr
    assert "captured" in done.stderr
    profile = DeviceProfile.model_validate(
        {"name": "cpu", "engine": "lopa_ascend", "device": "cpu", "quantization": "w8a8", "max_model_len": 320}
    )
    results = [json.loads(line) for line in output.read_text().splitlines()]
    with build_generator(profile, load_run(ROOT / "configs/runs/demo_block_causal.yaml", run)) as generator:
        texts = generator.complete(*(result["question"] + "\n" for result in questions()))
    assert [result["text"] for result in sorted(results, key=lambda result: result["id"])] == texts
    print(texts[0])


def questions() -> list[dict[str, str]]:
    lines = (ROOT / "models/demo/heldout_math.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:2]]


def test_the_first_run_says_what_it_would_do() -> None:
    done = start("scripts/first_910c_run.sh", DRY_RUN="true")
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert "common.commands doctor --profile ascend_910c_tp4_bp4 --selftest" in first
    assert last.startswith("scripts/bench.sh ascend_910c_tp4_bp4 first_910c")


def test_the_first_run_ends_with_the_reason_where_there_is_no_device(tmp_path: Path) -> None:
    done = start("scripts/first_910c_run.sh", str(tmp_path / "out"), PYTHONPATH="")
    assert done.returncode == 2
    assert "missing" in done.stdout and "Traceback" not in done.stdout + done.stderr
    assert "== demo" not in done.stdout
    assert (tmp_path / "out" / "doctor.txt").is_file()


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("LOPA_REHEARSAL"), reason="takes some 20 minutes: set LOPA_REHEARSAL=1")
def test_the_first_run_from_end_to_end(torch_npu: Any, tmp_path: Path) -> None:
    """Every part of it on 2 x 2 simulated devices, with the shipped model and a tiny one of random weights."""
    profile = yaml.safe_load((ROOT / "configs" / "profiles" / f"{PROFILE}.yaml").read_text())
    profile["mesh"] = {"branch_parallel_size": 2, "tensor_parallel_size": 2}
    profile["max_model_len"] = 320
    profile["graph"] |= {"cache_dir": str(tmp_path / "graphs"), "token_buckets": [96, 176], "row_buckets": [8, 16]}
    run = yaml.safe_load((ROOT / "configs" / "runs" / "first_910c.yaml").read_text())
    run["model"] = str(write_model(tmp_path))
    run["decode"] |= {"block_size": 16, "max_new_tokens": 32, "num_lookahead": 3}
    for name, content in (("profile", profile), ("run", run)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    rehearsal = {
        "PROFILE": str(tmp_path / "profile.yaml"), "BENCH_RUN": str(tmp_path / "run.yaml"), "PROBLEMS": "1",
        "SHAPES": "1x16 4x16", "BENCH_OPTIONS": "--steps 2 --cached 32",
    }  # fmt: skip
    out = tmp_path / "out"
    done = start("scripts/first_910c_run.sh", str(out), timeout_s=1500, **rehearsal, **machine(torch_npu))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    summary = done.stdout[done.stdout.rindex("doctor ") :]
    assert summary.count(" ok") == 13 and "exit code" not in summary
    modes = ("npugraph_ex", "npugraph", "torchair", "eager")
    assert (out / "same_texts.txt").read_text().count("1 of 1 texts") >= len(modes) - 1
    for mode in (*modes, "prefetch"):
        assert json.loads((out / f"bench_{mode}.json").read_text())["steps"]
    with tarfile.open(f"{out}.tar.gz") as archive:
        assert "out/bench_prefetch.json" in archive.getnames()
    print(done.stdout)
