"""HCCL groups of several simulated devices: collectives, the mesh, capture, and a tensor-parallel layer."""

from __future__ import annotations

import pytest
from sim.ranks import run_ranks

from tests.soaking import soaking

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("torch_npu")]


@pytest.mark.parametrize("target", ["collectives", pytest.param("captured_collective", marks=pytest.mark.slow)])
def test_on_two_ranks(target: str) -> None:
    run_ranks(f"npu_ranks:{target}", world_size=2)


def test_a_captured_collective_pairs_with_the_same_capture_only() -> None:
    for told in run_ranks("npu_ranks:collectives_that_do_not_pair", world_size=2):
        assert told[0].startswith("collectives that do not pair, a device would hang: rank 0: c10d::allreduce_, coll")
        assert told[0].endswith("captured after 1 eager ones; rank 1: c10d::allreduce_, eager")
        assert "after 1 eager ones; rank 1" in told[1] and told[1].endswith("captured after 2 eager ones")


def test_a_shape_that_one_rank_cannot_capture_is_captured_nowhere() -> None:
    """A graph that both have is replayed on; where ranks do not ask each other, collectives do not pair."""
    for agreed, alone in run_ranks("npu_ranks:one_rank_refuses", world_size=2):
        assert agreed == [9.0, 11.0, 9.0, 13.0, 11.0, 1]
        assert alone.startswith("collectives that do not pair, a device would hang: rank 0:")


@soaking
def test_every_axis_of_the_mesh_has_its_groups() -> None:
    sums = run_ranks("npu_ranks:groups_per_axis", world_size=8)
    for rank, (dp, bp, tp) in enumerate(sums):
        assert (dp, bp, tp) == (2 * (rank % 4) + 4, 2 * (rank - (rank & 2)) + 2, 2 * (rank - (rank & 1)) + 1)


def test_a_tensor_parallel_layer_equals_the_whole_one() -> None:
    """Up to the activations of o and down, which each shard quantizes on its own."""
    differences = run_ranks("npu_ranks:tensor_parallel_layer", world_size=2)
    assert differences[0] == differences[1] < 0.02


@soaking
def test_a_node_of_sixteen() -> None:
    places = run_ranks("npu_ranks:place", world_size=16)
    assert places == [[rank, rank, str(rank)] for rank in range(16)]


@pytest.mark.slow
def test_a_failing_rank_is_reported() -> None:
    with pytest.raises(RuntimeError, match="captured_collective on 3 ranks failed"):
        run_ranks("npu_ranks:captured_collective", world_size=3)
