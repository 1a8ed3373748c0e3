"""The scheduler's loops decide as the reference does, which decodes one request after another in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from compare_plain import difference
from started import python

from common.compiled import IS_COMPILED
from common.decoding.scheduling.tables import BLOCK, Rooms


@pytest.mark.parametrize(
    "first", [0, 25, *(pytest.param(first, marks=pytest.mark.slow) for first in range(50, 1000, 25))]
)
def test_random_decodes_are_the_same(first: int) -> None:
    for seed in range(first, first + (25 if IS_COMPILED else 5)):
        assert difference(seed) is None, seed


@pytest.mark.slow
def test_uncompiled_loops_decide_alike() -> None:
    done = python("tests/compare_plain.py", "1000", "12", env={"NUMBA_DISABLE_JIT": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_stretches_keep_what_they_hold_and_memory_follows_what_is_needed() -> None:
    rng, rooms, held = np.random.default_rng(0), Rooms({"block_B": BLOCK}, 8), dict[int, int]()
    for step in range(300):
        slot = int(rng.integers(8))
        if slot in held and step != 100:
            rooms.give(slot)
            del held[slot]
        else:
            held[slot] = int(rng.integers(1, 40)) if step != 100 else 5000
            rooms.take(slot, held[slot])
            first = int(rooms.first_N[slot])
            rooms.arrays["block_B"]["start"][first : first + held[slot]] = slot
        for own, length in held.items():
            first = int(rooms.first_N[own])
            assert (rooms.arrays["block_B"]["start"][first : first + length] == own).all()
        if step == 100:
            rooms.give(slot)
            del held[slot]
    assert rooms.num_places < 8 * 40 * 4
