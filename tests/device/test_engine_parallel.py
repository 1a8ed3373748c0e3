"""The engine on several GPUs over NCCL: ranks agree, replay equals calling, a stuck peer ends in one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_cuda import CONFIG

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).parents[2]
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def start(
    tmp_path: Path, bp: int, tp: int, *options: str, worker: str = "parallel_worker.py"
) -> list[dict[str, Any]]:  # fmt: skip
    if torch.cuda.device_count() < bp * tp:
        pytest.skip(f"needs {bp * tp} GPUs, {torch.cuda.device_count()} are visible")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
        f"--nproc-per-node={bp * tp}", str(ROOT / "tests/device" / worker), str(tmp_path), str(bp), str(tp),
        str(tmp_path), *options,
    ]  # fmt: skip
    environment = {**os.environ, **MULTICAST_OFF, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if not options:
        assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(tmp_path.glob("rank*.json"))]


@pytest.mark.parametrize(("bp", "tp"), [(2, 1), (1, 2), (4, 1), (2, 2)])
def test_ranks_agree_and_replay_decodes_what_calling_does(tmp_path: Path, bp: int, tp: int) -> None:
    ranks = start(tmp_path, bp, tp)
    assert len(ranks) == bp * tp
    assert all(rank["sums_differ"] == 0 for rank in ranks)
    assert all(rank["captured"]["tokens"] == ranks[0]["captured"]["tokens"] for rank in ranks)
    assert all(rank["called"]["tokens"] == rank["captured"]["tokens"] for rank in ranks)
    if tp == 1:
        assert len({rank["captured"]["committed"] for rank in ranks}) == 1, "every rank holds the winner's KV"


@pytest.mark.parametrize(("bp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_passes_of_prompts_that_ranks_share_are_the_same_up_to_rounding(tmp_path: Path, bp: int, tp: int) -> None:
    ranks = start(tmp_path, bp, tp, worker="slices_worker.py")
    assert len(ranks) == bp * tp
    for name, first in ranks[0]["cases"].items():
        found = [rank["cases"][name] for rank in ranks]
        print(name, first["num_tokens"], "tokens:", ", ".join(f"{ms:.3f} ms" for ms in first["ms"]), "cut and not")
        cut, whole = first["num_tokens"]
        assert first["num_entries"] / bp <= cut <= 1.15 * first["num_entries"] / bp + 16 < whole, name
        assert all(one["misses"] == 0 and one["is_replay_exact"] for one in found), "slices are captured ahead"
        assert all(one["kv_error"] < 0.02 and one["tokens_alike"] > 0.8 for one in found), (name, found)
        assert all(one["confidence_error"] < 0.05 for one in found), (name, found)
        for tp_rank in range(tp):
            peers = {rank["cases"][name]["kv"] for rank in ranks if rank["tp_rank"] == tp_rank}
            assert len(peers) == 1, "every branch rank holds the same KV"


@pytest.mark.parametrize(("bp", "tp"), [(2, 1), (1, 2)])
def test_a_stuck_peer_ends_the_others_with_rank_and_step(tmp_path: Path, bp: int, tp: int) -> None:
    errors = [rank["error"] for rank in start(tmp_path, bp, tp, "stuck") if rank["error"] is not None]
    assert errors and all(error.startswith("rank ") and "step" in error for error in errors)
    assert "no error" not in errors


@pytest.mark.parametrize("axis", ["branch", "tensor"])
@pytest.mark.parametrize(
    ("how", "exit_code", "reason"),
    [(signal.SIGKILL, 137, "rank 1 (pid "), (signal.SIGSTOP, 2, "rank 0 failed: rank 0, step ")],
    ids=["killed", "stopped"],
)
def test_a_lost_peer_ends_the_job_and_finished_requests_are_kept(
    tmp_path: Path, axis: str, how: signal.Signals, exit_code: int, reason: str
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, {torch.cuda.device_count()} are visible")
    output = tmp_path / "o.jsonl"
    command = [
        sys.executable, "-m", "common.commands.job", "run", "h200_tp1_bp1", "demo",
        "--set", f"mesh.{axis}_parallel_size=2", "--set", "collective_timeout_s=8", "--set", "max_model_len=512",
        "--set", f"output.path={output}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process: subprocess.Popen[str] = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)  # type: ignore[call-overload]
    try:
        deadline = time.monotonic() + 120
        while not output.exists() or output.read_bytes().count(b"\n") < 3:
            assert process.poll() is None and time.monotonic() < deadline, "no results appeared"
            time.sleep(0.05)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(sorted(map(int, workers))[1], how)
        _, errors = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == exit_code, errors
    assert reason in errors.splitlines()[-1] and "Traceback" not in errors
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert len(records) >= 3 and all("text" in record for record in records)
