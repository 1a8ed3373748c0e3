"""What a user starts on a node, on simulated devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import DeviceProfile
from common.config.files import load_run
from common.generate import build_generator
from tests.distributed.ascend_launch import write_model
from tests.soaking import soaking

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
    run = ["decode.num_lookahead=3", "input.limit=1", f"output.path={output}"]
    graph = ["graph.mode=npugraph", "graph.token_buckets=[128]", "npu.row_buckets=[16]"]  # one shape to capture
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
    return [json.loads(line) for line in lines[:1]]


def test_the_first_run_says_what_it_would_do() -> None:
    done = start("scripts/first_910c_run.sh", DRY_RUN="true")
    assert done.returncode == 0, done.stderr
    _, doctor, selftest, *_, last = done.stdout.splitlines()
    assert doctor.endswith("common.commands doctor --profile ascend_910c_tp4_bp4 ")
    assert selftest.endswith("common.commands doctor --profile ascend_910c_tp4_bp4 --selftest ")
    assert last.startswith("env scripts/bench.sh ascend_910c_tp4_bp4 first_910c")
    assert "env HCCL_OP_EXPANSION_MODE=AI_CPU scripts/bench.sh" in done.stdout


@pytest.mark.slow
def test_the_first_run_ends_with_the_reason_where_there_is_no_device(tmp_path: Path) -> None:
    done = start("scripts/first_910c_run.sh", str(tmp_path / "out"), PYTHONPATH="")
    assert done.returncode == 2
    assert "missing" in done.stdout and "Traceback" not in done.stdout + done.stderr
    assert "== demo" not in done.stdout
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert "out/doctor.txt" in archive.getnames()


# A Python that is no Python: of the steps one fails, one leaves a process of another session behind and never ends, and
# some write what CANN and torchrun would.
PRETENDER = """#!/usr/bin/env bash
cd "$ASCEND_PROCESS_LOG_PATH" && mkdir -p debug/plog && cd debug/plog || exit 9
case "$*" in
*--selftest*) echo "swiglu is wrong"; echo "[ERROR] aicore exception" >plog-1.log; exit 2 ;;
*graph.mode=npugraph*demo_npugraph.jsonl*)
  export TORCHELASTIC_RUN_ID=1 LOCAL_RANK=3
  setsid PYTHON -c "$STUCK" &
  echo "under way"; sleep 1000 ;;
*first_910c*requests*) echo "[INFO] HCCL(1):[SelectAlgfor91093] algName is [AIV]" | tee plog-1.log ;;
*) echo "$@" ;;
esac
"""
STUCK = "import time\ndef a_replay_that_never_ends():\n    time.sleep(1234)\na_replay_that_never_ends()"


def pretend(folder: Path, text: str) -> dict[str, str]:
    pretender = folder / "python"
    pretender.write_text(text.replace("PYTHON", sys.executable))
    pretender.chmod(0o755)
    return {"PYTHON": str(pretender), "STUCK": STUCK}


def summary_of(out: Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in (out / "summary.txt").read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("spy", [False, True], ids=["faulthandler", "py-spy"])
def test_the_first_run_notes_what_fails_and_goes_on(tmp_path: Path, spy: bool) -> None:
    out = tmp_path / "out"
    environment = pretend(tmp_path, PRETENDER) | {"LIMIT": "12", "VARIANTS": "prefetch ai_cpu", "PATH": "/usr/bin:/bin"}
    if spy:
        (tmp_path / "py-spy").write_text('#!/bin/sh\necho "$1 $2: in a_replay_that_never_ends, by py-spy"\n')
        (tmp_path / "py-spy").chmod(0o755)
    done = start("scripts/first_910c_run.sh", str(out), **environment)
    assert done.returncode == 1
    noted = summary_of(out)
    failed = {name: said.split(",")[0] for name, said in noted.items() if said != "ok"}
    assert failed == {"selftest": "exit code 2", "demo_npugraph": "no end within 12 s"}
    assert list(noted)[-1] == "bench_ai_cpu" and len(noted) == 17
    with tarfile.open(f"{out}.tar.gz") as archive:
        packed = set(archive.getnames())
    assert {"out/demo_npugraph.txt", "out/bench_ai_cpu.txt", "out/summary.txt"} <= packed
    assert "out/plog/selftest/debug/plog/plog-1.log" in packed
    stuck = (out / "demo_npugraph.txt").read_text()
    assert "under way" in stuck and "-- stack of process" in stuck
    said = stuck.partition("-- stack of process")[2]
    assert "in a_replay_that_never_ends" in said and ("by py-spy" in said) == spy and said.count("-- stack of") == 0
    assert "\nLOCAL_RANK=3\n" in (out / "demo_npugraph.ranks.txt").read_text()
    assert "algName is [AIV]" in (out / "algorithms.hccl.txt").read_text()
    killed, following = (out / f"demo_{mode}.txt" for mode in ("npugraph", "npugraph_ex"))
    assert following.stat().st_mtime - killed.stat().st_mtime > 9, "HCCL wants time after processes that were killed"
    assert {"lscpu", "numactl -H", "hccn_tool -i 0 -tls -g", "npu-smi info -t topo"} <= {
        line.removeprefix("-- ") for line in (out / "machine.txt").read_text().splitlines()
    }
    left = subprocess.run(["pgrep", "-f", "sleep.1234"], capture_output=True, text=True).stdout
    assert left == ""


@pytest.mark.slow
def test_the_whole_first_run_has_a_limit(tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = pretend(tmp_path, '#!/usr/bin/env bash\ncase "$*" in *--selftest*) sleep 1000 ;; esac\n')
    done = start("scripts/first_910c_run.sh", str(out), TOTAL="5", VARIANTS="prefetch", **environment)
    assert done.returncode == 1
    noted = summary_of(out)
    assert noted["selftest"].startswith("no end within the run's 5 s")
    assert noted["bench_prefetch"] == "not started: the whole run may take 5 s"


@pytest.mark.slow
def test_an_interrupted_first_run_is_packed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    pretender = pretend(tmp_path, '#!/usr/bin/env bash\ncase "$*" in *--selftest*) sleep 1000 ;; esac\n')
    environment = {**os.environ, **pretender}
    running = subprocess.Popen(["scripts/first_910c_run.sh", str(out)], env=environment, cwd=ROOT)
    while not (out / "selftest.txt").exists():
        time.sleep(0.1)
    running.terminate()
    running.wait(timeout=60)
    assert tarfile.is_tarfile(f"{out}.tar.gz")


def rehearse(torch_npu: Any, tmp_path: Path, **environment: str) -> tuple[Path, dict[str, str], str]:
    """Rehearse on 2 x 2 simulated devices, with the shipped model and a tiny random one: folder, summary, output."""
    profile = yaml.safe_load((ROOT / "configs" / "profiles" / f"{PROFILE}.yaml").read_text())
    profile["mesh"] = {"branch_parallel_size": 2, "tensor_parallel_size": 2}
    profile["max_model_len"] = 320
    profile["graph"]["token_buckets"] = [96, 176]
    profile["npu"] |= {"cache_dir": str(tmp_path / "graphs"), "row_buckets": [8, 16]}
    run = yaml.safe_load((ROOT / "configs" / "runs" / "first_910c.yaml").read_text())
    run["model"] = str(write_model(tmp_path))
    run["decode"] |= {"block_size": 16, "max_new_tokens": 32, "num_lookahead": 3}
    for name, content in (("profile", profile), ("run", run)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    rehearsal = {
        "PROFILE": str(tmp_path / "profile.yaml"), "BENCH_RUN": str(tmp_path / "run.yaml"), "PROBLEMS": "1",
        "SHAPES": "1x16 4x16", "BENCH_OPTIONS": "--no-mixes --requests 1 --steps 2 --cached 32",
    }  # fmt: skip
    out = tmp_path / "out"
    rehearsal |= environment
    done = start("scripts/first_910c_run.sh", str(out), timeout_s=6000, **rehearsal, **machine(torch_npu))
    print(done.stdout, done.stderr)
    summary = summary_of(out)
    with tarfile.open(f"{out}.tar.gz") as archive:
        assert {f"out/{name}.txt" for name in summary} <= set(archive.getnames())
    return out, summary, done.stdout


@pytest.mark.sim
@soaking
def test_the_first_run_from_end_to_end(torch_npu: Any, tmp_path: Path) -> None:
    out, summary, _ = rehearse(torch_npu, tmp_path, VARIANTS="prefetch ai_cpu attention_auto")
    assert set(summary.values()) == {"ok"} and len(summary) == 16
    modes = ("npugraph_ex", "npugraph", "torchair", "eager")
    assert (out / "same_texts.txt").read_text().count("1 of 1 texts") >= len(modes) - 1
    for mode in (*modes, "prefetch"):
        assert json.loads((out / f"bench_{mode}.json").read_text())["steps"]


@pytest.mark.sim
@soaking
def test_a_first_run_with_faults(torch_npu: Any, tmp_path: Path) -> None:
    """One operator is wrong, on one rank a capture is refused, in one step the device hangs and in one a launch does
    not return: each is named, the rest is done, and what explains them is packed."""
    faults = {
        "LOPA_SIM_WRONG": "npu_rms_norm",
        "LOPA_SIM_HANG": "demo_bf16",
        "LOPA_SIM_REFUSE": "--profile-trace",
        "LOPA_SIM_STUCK": "bench_prefetch",
    }
    out, summary, _ = rehearse(
        torch_npu,
        tmp_path,
        MODES=" ",
        VARIANTS="prefetch ai_cpu",
        LIMIT=os.environ.get("LIMIT", "600"),
        SHAPES="1x16",
        BENCH_OPTIONS="--no-mixes --requests 1 --steps 1 --cached 32",
        **faults,
    )
    failed = {name: said.split(",")[0][:9] for name, said in summary.items() if said != "ok"}
    # The trace has no end of its own here: CANN's msprof is not simulated.
    ends = {"selftest": "exit code", "demo_bf16": "exit code", "trace": "exit code", "bench_prefetch": "no end wi"}
    assert failed == ends
    said = {name: (out / f"{name}.txt").read_text() for name in summary}
    assert "rms_norm" in next(line for line in said["selftest"].splitlines() if "wrong" in line)
    assert "rms_norm is wrong here" in said["algorithms"]
    assert "the device has not answered for 60 s" in said["demo_bf16"]
    assert "Traceback" in said["demo_bf16"].partition("lopa: rank 0, step 0: the device")[0]
    assert "cannot be captured" in said["trace"]
    stacks = said["bench_prefetch"].split("-- stack of process")[1:]
    assert sum("_launch_that_does_not_return" in stack for stack in stacks) == 4
    ranks = (out / "bench_prefetch.ranks.txt").read_text()
    assert {f"\nLOCAL_RANK={rank}\n" in ranks for rank in range(4)} == {True}
    assert json.loads((out / "bench_ai_cpu.json").read_text())["steps"]
    with tarfile.open(f"{out}.tar.gz") as archive:
        assert {"out/plog", "out/bench_prefetch.ranks.txt", "out/summary.txt"} <= set(archive.getnames())
