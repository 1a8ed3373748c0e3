"""Tokens do not depend on how many processes decode, nor on how they are arranged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).parent / "worker.py"
ROOT = WORKER.parents[2]
MESHES = [(1, 2, 1), (1, 4, 1), (1, 3, 1), (1, 1, 2), (1, 2, 2), (2, 1, 1), (2, 2, 1)]


@cache
def ranks_of(mesh: tuple[int, int, int]) -> list[dict[str, Any]]:
    """What every rank of a mesh decoded and holds."""
    dp, bp, tp = mesh
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(WORKER), str(dp), str(bp), str(tp), folder]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    assert len(ranks) == dp * bp * tp
    return ranks


def single() -> dict[str, Any]:
    return ranks_of((1, 1, 1))[0]["results"]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "dp{}-bp{}-tp{}".format(*mesh))
def test_the_mesh_does_not_change_the_tokens(mesh: tuple[int, int, int]) -> None:
    for name, expected in single().items():
        decoded: dict[str, Any] = {}
        for rank in ranks_of(mesh):
            decoded.update(rank["results"][name]["tokens"])
        assert decoded == expected["tokens"], name


@pytest.mark.parametrize("mesh", [(1, 4, 1), (1, 2, 2)], ids=lambda mesh: "dp{}-bp{}-tp{}".format(*mesh))
def test_after_every_commit_all_branch_ranks_hold_the_same_kv(mesh: tuple[int, int, int]) -> None:
    for name in single():
        for tp_rank in range(mesh[2]):
            peers = [rank["results"][name] for rank in ranks_of(mesh) if rank["place"]["tp"] == tp_rank]
            assert len(peers) == mesh[1]
            assert all(peer["kv"] == peers[0]["kv"] for peer in peers), name
