"""Tokens do not depend on how many processes share the branches."""

from __future__ import annotations

import pytest

from tests.distributed.meshes import Mesh, assert_same_kv, assert_same_tokens, name_of
from tests.soaking import soaking

pytestmark = pytest.mark.slow  # test_mixed_meshes.py has branches on two ranks


@pytest.mark.parametrize("mesh", [pytest.param((1, 4, 1), marks=soaking), (1, 3, 1)], ids=name_of)
def test_the_mesh_does_not_change_the_tokens(mesh: Mesh) -> None:
    assert_same_tokens(mesh)


def test_after_every_commit_all_branch_ranks_hold_the_same_kv() -> None:
    assert_same_kv((1, 3, 1))
