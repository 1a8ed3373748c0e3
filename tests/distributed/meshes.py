"""Decode the same requests on any arrangement of processes, each started once for all tests of a file."""

from __future__ import annotations

import json
import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from started import python

Mesh = tuple[int, int, int]  # dp, bp, tp


def start_ranks(worker: str, mesh: Mesh, *calls: tuple[Any, ...], timeout: float = 600) -> None:
    """Have the ranks of a mesh run a worker of this folder, with one call after another."""
    command = ["-m", "tests.distributed.ranks", worker, *mesh, json.dumps(calls, default=str)]
    done = python(*command, env={"OMP_NUM_THREADS": "1"}, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]


@cache
def ranks_of(mesh: Mesh) -> list[dict[str, Any]]:
    """What every rank of a mesh decoded and holds."""
    with tempfile.TemporaryDirectory() as folder:
        start_ranks("worker", mesh, (folder,))
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    assert len(ranks) == math.prod(mesh)
    return ranks


def single() -> dict[str, Any]:
    return ranks_of((1, 1, 1))[0]["results"]


def name_of(mesh: Mesh) -> str:
    return "dp{}-bp{}-tp{}".format(*mesh)


def assert_same_tokens(mesh: Mesh) -> None:
    for name, expected in single().items():
        decoded: dict[str, Any] = {}
        for rank in ranks_of(mesh):
            decoded.update(rank["results"][name]["tokens"])
        assert decoded == expected["tokens"], name


def assert_same_kv(mesh: Mesh) -> None:
    for name in single():
        for tp_rank in range(mesh[2]):
            peers = [rank["results"][name] for rank in ranks_of(mesh) if rank["place"]["tp"] == tp_rank]
            assert len(peers) == mesh[1]
            assert all(peer["kv"] == peers[0]["kv"] for peer in peers), name
