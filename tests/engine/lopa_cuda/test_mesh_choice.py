"""The mesh that the engine decides on by measuring."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.checkpoint import check_tensor_parallel, load_model_config
from common.config import DecodeConfig
from lopa_cuda.mesh_choice import choose_mesh

DREAM = load_model_config(Path(__file__).parents[3] / "configs" / "models" / "dream_7b")
H200 = {"bytes_per_s": 4.29e12, "flops_per_s": 790e12}


@pytest.mark.parametrize("num_lookahead", [0, 3, 7, 15])
@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
def test_the_chosen_mesh_uses_every_process_and_divides_the_heads(num_processes: int, num_lookahead: int) -> None:
    mesh = choose_mesh(num_processes, DREAM, DecodeConfig(num_lookahead=num_lookahead), 2, H200)
    assert mesh.num_processes == num_processes
    check_tensor_parallel(DREAM, mesh.tensor_parallel_size)


def test_few_branches_share_layers_and_many_share_branches() -> None:
    few = choose_mesh(4, DREAM, DecodeConfig(num_lookahead=0), 2, H200)
    many = choose_mesh(4, DREAM, DecodeConfig(num_lookahead=15), 2, H200)
    assert few.tensor_parallel_size > many.tensor_parallel_size
