"""Every family's tokens are the same on every arrangement of processes, alone and among others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.meshes import Mesh, name_of, start_ranks
from tests.distributed.ranks import cpu_profile
from tests.distributed.strategies_worker import CASES, decode_all
from tests.soaking import soaking

MESHES = [(1, 2, 2), *(pytest.param(mesh, marks=soaking) for mesh in ((1, 4, 1), (2, 1, 1)))]


@cache
def alone(name: str) -> dict[str, Any]:
    return decode_all(cpu_profile(), name, num_slots=1, shares=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_several_requests_at_once_decode_as_one_after_another(name: str) -> None:
    assert decode_all(cpu_profile(), name, num_slots=8) == alone(name)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_the_mesh_does_not_change_the_tokens(mesh: Mesh, tmp_path: Path) -> None:
    assert decoded_on(mesh, "lopa_cuda", CASES, tmp_path) == {name: alone(name) for name in CASES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "names"),
    [((1, 1, 4), ["llada2 edits"]), pytest.param((1, 2, 2), ["sdar fused", "llada2 edits"], marks=soaking)],
    ids=str,
)
def test_the_ascend_engines_meshes_decode_as_one_process_of_the_cuda_engine(
    mesh: Mesh, names: list[str], tmp_path: Path
) -> None:
    """Two of four ranks share a KV head, and each has two of eight experts."""
    assert decoded_on(mesh, "lopa_ascend", names, tmp_path) == {name: alone(name) for name in names}


def decoded_on(mesh: Mesh, engine: str, names: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the requests of all replicas, by case and setting."""
    start_ranks("strategies_worker", mesh, *((engine, name, folder) for name in names))
    decoded: dict[str, dict[str, Any]] = {}
    for path in folder.glob("*.json"):
        of_case = decoded.setdefault(path.stem.rpartition(" ")[0], {})
        for setting, tokens in json.loads(path.read_text()).items():
            of_case[setting] = {**of_case.get(setting, {}), **tokens}
    return decoded
