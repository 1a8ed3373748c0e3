"""HCCL groups of several simulated devices: collectives, the mesh, capture, and a tensor-parallel layer."""

from __future__ import annotations

import os

import pytest
from sim.ranks import run_ranks

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("torch_npu")]


def test_collectives_of_two_ranks() -> None:
    run_ranks("npu_ranks:collectives", world_size=2)


@pytest.mark.skipif(not os.environ.get("LOPA_SLOW"), reason="takes a while: set LOPA_SLOW=1")
def test_every_axis_of_the_mesh_has_its_groups() -> None:
    sums = run_ranks("npu_ranks:groups_per_axis", world_size=8)
    for rank, (dp, bp, tp) in enumerate(sums):
        assert (dp, bp, tp) == (2 * (rank % 4) + 4, 2 * (rank - (rank & 2)) + 2, 2 * (rank - (rank & 1)) + 1)


def test_a_tensor_parallel_layer_equals_the_whole_one() -> None:
    """Up to the activations of o and down, which each shard quantizes on its own."""
    differences = run_ranks("npu_ranks:tensor_parallel_layer", world_size=2)
    assert differences[0] == differences[1] < 0.02


def test_every_rank_has_its_device() -> None:
    places = run_ranks("npu_ranks:place", world_size=4)
    assert places == [[rank, rank, str(rank)] for rank in range(4)]
