"""The search for tiles proposes only what the kernel takes."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from kernel_bench.inputs import KINDS, linear_shapes
from kernel_bench.tuning import candidates_of


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_divides_its_rows_and_the_gated_linear_is_not_split(kind: str, tp: int) -> None:
    for name, (_, num_in) in linear_shapes(tp).items():
        for num_tokens in (16, 64, 256):
            for config in candidates_of(name, kind, num_tokens, tp):
                assert num_in % config.block_k == 0
                assert name != "gate_up" or config.splits == 1
