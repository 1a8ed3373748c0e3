"""Tokens and predictions do not depend on branch, tensor and data parallelism, alone and beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.checkpoint import load_model_config
from common.config import DeviceProfile
from tests.distributed.meshes import Mesh, assert_same_kv, assert_same_tokens, name_of, start_ranks
from tests.engine.families.passes import TRACES, engine_of, first_pass, read
from tests.soaking import soaking

pytestmark = pytest.mark.slow  # every mesh takes a minute on two cores

# dp beside bp: tests/engine/test_run_batch.py too.
MESHES = [(1, 2, 2), (1, 1, 4), (2, 1, 1), (1, 3, 1)]
PARTS = [(1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 4, 1)]


@pytest.mark.parametrize("mesh", [*MESHES, *(pytest.param(mesh, marks=soaking) for mesh in PARTS)], ids=name_of)
def test_the_mesh_does_not_change_the_tokens(mesh: Mesh) -> None:
    assert_same_tokens(mesh)


@pytest.mark.parametrize("mesh", [(1, 2, 2), (1, 3, 1)], ids=name_of)
def test_after_every_commit_all_branch_ranks_hold_the_same_kv(mesh: Mesh) -> None:
    assert_same_kv(mesh)


SMALL = TRACES[1::2]  # of each family's model_b, three of which have two KV heads for the four ranks


def test_tp_changes_no_prediction(cpu: DeviceProfile, tmp_path: Path) -> None:
    start_ranks("families_worker", (1, 1, 4), *((name, number, tmp_path) for number, name in enumerate(SMALL)))
    for number, name in enumerate(SMALL):
        shared, trace = json.loads((tmp_path / f"{number}.json").read_text()), read(name)
        alone = engine_of(cpu, trace).forward(first_pass(trace, load_model_config(trace["folder"]))).values_3T
        assert shared[0] == alone[0].tolist(), name
        for row in (1, 2):
            assert shared[row] == pytest.approx(alone[row].tolist(), abs=1e-5), name
