"""A pass of prompts that is cut over the branch ranks gives every rank the same KV, and the tokens of one process."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.meshes import Mesh, name_of, start_ranks
from tests.distributed.slices_worker import CASES, NUM_SLOTS, PROMPTS

QUICK = ("full", "sdar pieces")
BRANCHES = ((1, 2, 1), (1, 4, 1))
BOTH = (1, 2, 2)
ALONE = (1, 1, 1)


@cache
def decoded_on(meshes: tuple[Mesh, ...], *names: str) -> dict[Mesh, dict[tuple[str, int], list[dict[str, Any]]]]:
    """What every rank decoded, by mesh, case and number of slots."""
    with tempfile.TemporaryDirectory() as folder:
        for mesh in meshes:
            output = Path(folder) / name_of(mesh)
            output.mkdir()
            calls = ((name, slots, output) for name in names for slots in NUM_SLOTS)
            start_ranks("slices_worker", mesh, *calls, timeout=1200)
        return {
            mesh: {
                (name, slots): [
                    json.loads((Path(folder) / name_of(mesh) / f"{name}.{slots}.{rank}.json").read_text())
                    for rank in range(mesh[0] * mesh[1] * mesh[2])
                ]
                for name in names
                for slots in NUM_SLOTS
            }
            for mesh in meshes
        }


def assert_cut_and_the_same(mesh: Mesh, meshes: tuple[Mesh, ...], names: tuple[str, ...]) -> None:
    decoded = decoded_on((ALONE, *meshes), *names)
    alone, num_branch_ranks = decoded[ALONE], mesh[1]
    for case, ranks in decoded[mesh].items():
        tokens: dict[str, Any] = {}
        for rank in ranks:
            tokens |= rank["tokens"]
            assert_cut(rank["passes"], num_branch_ranks, has_neighbours=case[1] > 1)
        (one,) = alone[case]
        assert tokens == one["tokens"] and len(tokens) == len(PROMPTS), case
        for peers in (ranks[at :: mesh[2]] for at in range(mesh[2])):  # of one part of the model
            for at in range(0, len(peers), num_branch_ranks):
                first, *others = (peer["kv"][:1] for peer in peers[at : at + num_branch_ranks])
                assert all(kv == first for kv in others), case


def assert_cut(passes: list[tuple[int, int, bool]], num_ranks: int, *, has_neighbours: bool) -> None:
    """The first pass holds nothing but prompts; without neighbours all do. Blocks that are routed together are cut
    nowhere."""
    for num_entries, num_tokens, is_cut in passes[:1] if has_neighbours else passes:
        assert is_cut and 0 <= num_tokens - -(-num_entries // num_ranks) < 16


@pytest.mark.slow
@pytest.mark.parametrize("mesh", BRANCHES, ids=name_of)
def test_branch_ranks_share_prompts(mesh: Mesh) -> None:
    assert_cut_and_the_same(mesh, BRANCHES, QUICK)


@pytest.mark.slow
def test_every_kind_of_prompt_is_shared() -> None:
    assert_cut_and_the_same(BOTH, (BOTH,), tuple(CASES))
