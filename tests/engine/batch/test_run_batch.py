"""scripts/run_batch.sh from end to end: torchrun, the engine on a small random model, killed workers and launchers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]


def write_files(folder: Path, model: Path, num_requests: int = 6, mesh: dict[str, int] | None = None) -> None:
    profile = {"name": "p", "engine": "lopa_cuda", "device": "cpu", "dtype": "float32", "mesh": mesh or {}}
    decode = {"num_lookahead": 3, "block_size": 8, "max_new_tokens": 32, "stop_at_eos": False}
    run = {"model": str(model), "decode": decode, "input": {"path": "in.jsonl"}, "output": {"path": "o.jsonl"}}
    (folder / "p.yaml").write_text(yaml.safe_dump(profile))
    (folder / "r.yaml").write_text(yaml.safe_dump(run))
    lines = [json.dumps({"id": number, "prompt": f"question {number}"}) for number in range(num_requests)]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")


def start(folder: Path, *options: str, inside: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
    """inside: a command that starts others."""
    # One session each, as a shell or a scheduler would have it: what a test kills is one process, not a group.
    return subprocess.Popen(
        [*inside, str(ROOT / "scripts/run_batch.sh"), "p.yaml", "r.yaml", *options],
        cwd=folder,
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], expected: int = 0) -> tuple[str, str]:
    output, errors = process.communicate(timeout=400)
    assert process.returncode == expected, errors
    return output, errors


def texts(folder: Path) -> dict[int, str]:
    records = [json.loads(line) for line in (folder / "o.jsonl").read_text().splitlines()]
    assert max(Counter(record["id"] for record in records).values()) == 1
    return {record["id"]: record["text"] if "text" in record else record["error"] for record in records}


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 240
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "no results appeared"
        time.sleep(0.02)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(int(child) for child in children)


@pytest.mark.slow
def test_branches_and_replicas_over_processes_give_what_one_process_gives(tmp_path: Path, model: Path) -> None:
    results = []
    for name, mesh in (("one", {}), ("four", {"data_parallel_size": 2, "branch_parallel_size": 2})):
        folder = tmp_path / name
        folder.mkdir()
        write_files(folder, model, mesh=mesh)
        with (folder / "in.jsonl").open("a") as stream:
            stream.write(json.dumps({"id": 6, "prompt": "long " * 1000}) + "\n")
        output, _ = finish(start(folder))
        assert "6 requests finished, 1 error" in output
        results.append(texts(folder))
        assert "5000 tokens" in results[-1][6]
    assert results[0] == results[1]
    metrics = json.loads((tmp_path / "four/o.metrics.json").read_text())
    assert metrics["requests"]["finished"] == metrics["this_start"]["requests"] == 6
    assert metrics["environment"]["mesh"] == {"dp": 2, "bp": 2, "tp": 1}


@pytest.mark.slow
def test_a_killed_worker_ends_the_job_and_a_restart_finishes_it(tmp_path: Path, model: Path) -> None:
    write_files(tmp_path, model, num_requests=400, mesh={"branch_parallel_size": 2})
    process = start(tmp_path)
    wait_for_lines(tmp_path / "o.jsonl", 2)
    os.kill(workers_of(process)[1], signal.SIGKILL)
    killed_at = time.monotonic()
    _, errors = finish(process, expected=137)
    assert time.monotonic() - killed_at < 120
    assert errors.splitlines()[-1].startswith("lopa: rank 1 (pid ")
    assert "was killed by SIGKILL" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    num_done = len(texts(tmp_path))
    finish(start(tmp_path, "--set", f"input.limit={num_done + 2}"))
    assert sorted(texts(tmp_path)) == list(range(num_done + 2))


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_worker_that_goes_on_writing(tmp_path: Path, model: Path) -> None:
    write_files(tmp_path, model, num_requests=400, mesh={"data_parallel_size": 2})
    process = start(tmp_path)
    wait_for_lines(tmp_path / "o.jsonl", 2)
    process.kill()
    limit = ["--set", f"input.limit={len((tmp_path / 'o.jsonl').read_bytes().splitlines()) + 20}"]
    finish(start(tmp_path, *limit))
    assert len(texts(tmp_path)) >= 22


@pytest.mark.slow
def test_an_interrupted_launcher_stops_all_workers(tmp_path: Path, model: Path) -> None:
    write_files(tmp_path, model, num_requests=400, mesh={"branch_parallel_size": 2})
    process = start(tmp_path)
    wait_for_lines(tmp_path / "o.jsonl", 2)
    process.send_signal(signal.SIGINT)
    _, errors = finish(process, expected=130)
    assert "stopped by SIGINT; " in errors
    assert "Traceback" not in errors
    assert len(texts(tmp_path)) >= 2


@pytest.mark.slow
def test_two_nodes_end_together_when_a_worker_of_one_is_killed(tmp_path: Path, model: Path) -> None:
    write_files(tmp_path, model, num_requests=400, mesh={"data_parallel_size": 2})
    port = str(free_port())
    nodes = [
        start(tmp_path, NNODES="2", NODE_RANK=str(node), MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for node in (0, 1)
    ]
    wait_for_lines(tmp_path / "o.jsonl", 4)
    os.kill(workers_of(nodes[1])[0], signal.SIGKILL)
    killed_at = time.monotonic()
    _, errors_of_1 = finish(nodes[1], expected=137)
    _, errors_of_0 = finish(nodes[0], expected=1)
    assert time.monotonic() - killed_at < 120
    assert "lopa: rank 1 (pid" in errors_of_1.splitlines()[-1]
    assert "lopa: node 1: rank 1 (pid" in errors_of_0.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--set", "model=absent"], "lopa: absent: no such folder; download the checkpoint and set `model`"),
        (["--set", "mesh.tensor_parallel_size=3"], "lopa: tensor_parallel_size 3 does not divide 4 heads"),
    ],
)
def test_mistakes_are_found_before_anything_is_started(
    tmp_path: Path, model: Path, options: list[str], sentence: str
) -> None:
    write_files(tmp_path, model, mesh={"branch_parallel_size": 2})
    _, errors = finish(start(tmp_path, *options), expected=2)
    assert errors.startswith(sentence)
    assert errors.count("\n") == 1
    assert not (tmp_path / "o.jsonl").exists()
