"""Answers held to a format are the same on every arrangement of processes and on both engines."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests.distributed.formats_worker import EOS, TEXTS, decode_all
from tests.distributed.meshes import start_ranks
from tests.distributed.ranks import cpu_profile
from tests.soaking import soaking


@cache
def alone() -> dict[str, list[int]]:
    return decode_all(cpu_profile())


def test_the_ascend_engine_decodes_as_the_cuda_engine() -> None:
    assert decode_all(cpu_profile("lopa_ascend")) == alone()
    pieces = {258: b"not ", 259: b"12"}
    for name, ids in alone().items():
        if name.endswith(" 1"):
            continue  # held to nothing
        text = b"".join(pieces[id] if id in pieces else bytes([id - 2]) for id in ids if id != EOS)
        assert text.decode() in TEXTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "engine"),
    [
        ((2, 1), "lopa_cuda"),
        ((1, 2), "lopa_ascend"),
        pytest.param((1, 2), "lopa_cuda", marks=soaking),
        pytest.param((2, 1), "lopa_ascend", marks=soaking),
    ],
)
def test_the_mesh_does_not_change_the_tokens(mesh: tuple[int, int], engine: str, tmp_path: Path) -> None:
    start_ranks("formats_worker", (1, *mesh), (engine, tmp_path))
    for path in tmp_path.glob("*.json"):
        assert json.loads(path.read_text()) == alone()
