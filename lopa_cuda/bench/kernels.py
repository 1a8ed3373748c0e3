"""The kernels' bench: its sections one after another on this GPU, with the tiles that its engines would use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from common.runtime import measure_floors
from lopa_cuda.bench.heads import heads
from lopa_cuda.bench.linears import compare_linears
from lopa_cuda.bench.stages import stages
from lopa_cuda.bench.steps import steps
from lopa_cuda.floors import median_seconds
from lopa_cuda.tiles import Kind, install_tiles, load_tiles, this_device

_CASES = [(1, 32), (1, 64), (1, 128), (4, 32), (8, 64), (8, 128)]  # rows, window


def measure_kernels(
    sections: Sequence[str], kinds: Sequence[Kind], token_counts: list[int], prefix: int
) -> dict[str, object]:
    """Run the sections and return what was measured by section; lines are printed as they come."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    tiles = load_tiles(this_device())
    install_tiles(tiles.table)
    print(f"tiles of {' and '.join(map(str, tiles.files)) or 'no file'}")
    floors = measure_floors(torch.device("cuda"), torch.bfloat16, median_seconds)
    print(floors, flush=True)
    result: dict[str, object] = {"floors": floors}
    if "linears" in sections:
        result["linears"] = compare_linears(kinds, token_counts)
    if "stages" in sections:
        result["stages"] = stages(_CASES, prefix)
    if "heads" in sections:
        result["heads"] = heads(token_counts)
    if "steps" in sections:
        result["steps"] = steps(kinds, _CASES, prefix, floors)
    return result
