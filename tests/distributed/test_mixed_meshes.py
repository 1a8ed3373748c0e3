"""Tokens do not depend on tensor and data parallelism, nor on branches beside them."""

from __future__ import annotations

import pytest

from tests.distributed.meshes import Mesh, assert_same_kv, assert_same_tokens, name_of
from tests.soaking import soaking

pytestmark = pytest.mark.slow  # every mesh takes a minute on two cores

# dp beside bp: tests/engine/test_run_batch.py too.
MESHES = [(1, 2, 2), (1, 1, 4), (2, 1, 1)]
PARTS = [(1, 2, 1), (1, 1, 2), (2, 2, 1)]


@pytest.mark.parametrize("mesh", [*MESHES, *(pytest.param(mesh, marks=soaking) for mesh in PARTS)], ids=name_of)
def test_the_mesh_does_not_change_the_tokens(mesh: Mesh) -> None:
    assert_same_tokens(mesh)


def test_after_every_commit_all_branch_ranks_hold_the_same_kv() -> None:
    assert_same_kv((1, 2, 2))
