"""Tokens do not depend on tensor and data parallelism, nor on branches beside them."""

from __future__ import annotations

import pytest

from tests.distributed.meshes import Mesh, assert_same_kv, assert_same_tokens, name_of

pytestmark = pytest.mark.slow  # every mesh takes a minute on two cores

# dp beside bp: tests/engine/test_run_batch.py too.
MESHES = [(1, 2, 1), (1, 2, 2), (1, 1, 2), (1, 1, 4), (2, 1, 1), (2, 2, 1)]


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_the_mesh_does_not_change_the_tokens(mesh: Mesh) -> None:
    assert_same_tokens(mesh)


def test_after_every_commit_all_branch_ranks_hold_the_same_kv() -> None:
    assert_same_kv((1, 2, 2))
