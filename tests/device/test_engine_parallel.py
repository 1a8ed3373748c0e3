"""The engine on several GPUs over NCCL: ranks agree, replay equals calling, a stuck peer ends in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_cuda import CONFIG

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).parents[2]
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def start(tmp_path: Path, bp: int, tp: int, *options: str) -> list[dict[str, Any]]:
    if torch.cuda.device_count() < bp * tp:
        pytest.skip(f"needs {bp * tp} GPUs, {torch.cuda.device_count()} are visible")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
        f"--nproc-per-node={bp * tp}", str(ROOT / "tests/device/parallel_worker.py"), str(tmp_path), str(bp), str(tp),
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
    assert all(rank["captured"]["tokens"] == ranks[0]["captured"]["tokens"] for rank in ranks)
    assert all(rank["called"]["tokens"] == rank["captured"]["tokens"] for rank in ranks)
    if tp == 1:
        assert len({rank["captured"]["committed"] for rank in ranks}) == 1, "every rank holds the winner's KV"


def test_a_stuck_peer_ends_the_others_with_rank_and_step(tmp_path: Path) -> None:
    errors = [rank["error"] for rank in start(tmp_path, 2, 1, "stuck") if rank["error"] is not None]
    assert errors and all(error.startswith("rank ") and "step" in error for error in errors)
    assert "no error" not in errors
