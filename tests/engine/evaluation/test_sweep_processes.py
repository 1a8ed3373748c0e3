"""scripts/sweep.sh with the demo model: launches in processes of their own, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.soaking import soaking

ROOT = Path(__file__).resolve().parents[3]
SWEEP = """
run: demo
folder: {folder}
set: {{input.limit: 4, decode.max_new_tokens: 32}}
rows:
  - {{name: a, profile: cpu, decode: {{num_lookahead: 0}}}}
  - {{name: b, profile: cpu, decode: {{num_lookahead: 1}}}}
  - {{name: c, profile: cpu_bp2, decode: {{num_lookahead: 1}}}}
"""

pytestmark = pytest.mark.slow


def sweep_in(folder: Path, text: str = SWEEP) -> Path:
    path = folder / "s.yaml"
    path.write_text(text.format(folder=folder / "out"))
    return path


def started(path: Path, *options: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    command = [str(ROOT / "scripts/sweep.sh"), str(path), *options]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    _, said = process.communicate(timeout=600)
    return said


def statuses(path: Path) -> dict[str, str]:
    rows = json.loads((path.parent / "out/sweep.json").read_text())["rows"]
    return {row["name"]: row["status"] for row in rows}


def num_records(path: Path, name: str) -> int:
    records = path.parent / f"out/{name}.jsonl"
    return records.read_text().count("\n") if records.exists() else 0


def processes_of(path: Path) -> list[int]:
    """Return the processes that have the sweep's file on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(path).encode() in words:
                found.append(int(entry.name))
    return found


def wait_for(path: Path, name: str, count: int) -> None:
    deadline = time.monotonic() + 240
    while num_records(path, name) < count:
        assert time.monotonic() < deadline, "no results appeared"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=soaking)])
def test_a_killed_sweep_leaves_no_process_and_goes_on_where_it_was(tmp_path: Path, number: signal.Signals) -> None:
    path = sweep_in(tmp_path)
    process = started(path)
    wait_for(path, "b", 1)
    process.send_signal(number)
    finished(process)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + 120
    while processes_of(path):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.1)
    assert num_records(path, "a") == 4
    said = finished(started(path))
    assert statuses(path) == dict.fromkeys("abc", "done"), said
    assert [num_records(path, name) for name in "abc"] == [4, 4, 4]


def test_a_launch_of_several_processes_that_fails_does_not_keep_the_others(tmp_path: Path) -> None:
    """What fails is the device memory that a point asks for; the two processes of c report it."""
    broken = SWEEP + "  - {{name: d, profile: cpu_bp2, set: {{max_num_requests: 100000000}}}}\n"
    path = sweep_in(tmp_path, broken)
    process = started(path)
    said = finished(process)
    assert process.returncode == 2, said
    assert statuses(path) == {"a": "done", "b": "done", "c": "done", "d": "failed"}
    assert said.count("trying again what has failed: d") == 1
    assert "1 of 4 points failed (d: " in said and "Traceback" not in said
