"""Answers held to a format are the same on every arrangement of processes and on both engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from common.config import DeviceProfile
from tests.distributed.meshes import ROOT
from tests.soaking import soaking

WORKER = Path(__file__).with_name("formats_worker.py")
sys.path.insert(0, str(WORKER.parent))  # as the worker itself has it
from formats_worker import EOS, TEXTS, decode_all  # noqa: E402


def profile(engine: str) -> DeviceProfile:
    return DeviceProfile(name="one", engine=engine, device="cpu", dtype="float32", max_model_len=256)


@cache
def alone() -> dict[str, list[int]]:
    return decode_all(profile("lopa_cuda"))


def test_the_ascend_engine_decodes_as_the_cuda_engine() -> None:
    assert decode_all(profile("lopa_ascend")) == alone()
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
    command = [sys.executable, str(WORKER), *map(str, mesh), str(tmp_path), engine]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    for path in tmp_path.glob("*.json"):
        assert json.loads(path.read_text()) == alone()
