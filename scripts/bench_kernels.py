"""Time the CUDA kernels on one GPU at Dream-7B's shapes: linears beside the library, stages, heads, steps.

    python scripts/bench_kernels.py [--sections linears stages heads steps] [--json FILE]

Everything is timed inside captured graphs, median over replays, rotating over enough weight copies that nothing stays
in L2. `lopa tune` searches tiles.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import triton
from kernel_bench.heads import heads
from kernel_bench.inputs import KINDS
from kernel_bench.linears import compare_linears
from kernel_bench.stages import stages
from kernel_bench.steps import steps

from common.runtime import measure_floors
from lopa_cuda.floors import median_seconds
from lopa_cuda.tiles import install_tiles, load_tiles, this_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", default=["linears", "stages", "heads", "steps"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 32, 64, 96, 128, 256])
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = [(1, 32), (1, 64), (1, 128), (4, 32), (8, 64), (8, 128)]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    tiles = load_tiles(this_device())
    install_tiles(tiles.table)
    print(f"tiles of {' and '.join(map(str, tiles.files)) or 'no file'}")
    floors = measure_floors(torch.device("cuda"), torch.bfloat16, median_seconds)
    result: dict[str, object] = {"floors": floors}
    print(floors, flush=True)
    if "linears" in arguments.sections:
        result["linears"] = compare_linears(arguments.kinds, arguments.tokens)
    if "stages" in arguments.sections:
        result["stages"] = stages(cases, arguments.prefix)
    if "heads" in arguments.sections:
        result["heads"] = heads(arguments.tokens)
    if "steps" in arguments.sections:
        result["steps"] = steps(arguments.kinds, cases, arguments.prefix, floors)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1, default=str))


if __name__ == "__main__":
    main()
