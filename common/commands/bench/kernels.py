"""`lopa bench kernels`: the CUDA kernels by themselves."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from common.commands.arguments.options import Parser, WholeNumber
from common.errors import ConfigError

_SECTIONS = ("linears", "stages", "heads", "steps")
_KINDS = ("bf16", "int8", "fp8")
_TOKENS = (16, 32, 64, 96, 128, 256)


def measure(arguments: list[str]) -> None:
    """Time the CUDA kernels on one GPU at Dream-7B's shapes: linears beside the library, stages, heads, steps.

    Everything is timed inside captured graphs, median over replays, rotating over enough weight copies that nothing
    stays in L2. `lopa tune` searches tiles.
    """
    known = parse(arguments)
    _require_gpu()
    from common.batch import result_file, write_whole

    output = None if known.output is None else result_file("--output", known.output, "floors")
    # By name, since engines stand on this package.
    study = import_module("lopa_cuda.bench.kernels")
    result = study.measure_kernels(known.sections, known.kinds, known.tokens, known.prefix)
    if output is not None:
        write_whole(output, json.dumps(result, indent=1, default=str) + "\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Ends the process with a usage message where they are wrong."""
    parser = Parser(
        prog="lopa bench kernels", description=measure.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", default=list(_SECTIONS), choices=_SECTIONS,
                        help="what to time; all if not given")  # fmt: skip
    parser.add_argument("--kinds", nargs="+", default=list(_KINDS), choices=_KINDS,
                        help="number formats of the weights; all if not given")  # fmt: skip
    parser.add_argument("--tokens", nargs="+", type=WholeNumber(32768), default=list(_TOKENS), metavar="N",
                        help="numbers of tokens")  # fmt: skip
    parser.add_argument("--prefix", type=WholeNumber(10**6), default=1024, help="cached positions of a row")
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser.parse_args(arguments)


def _require_gpu() -> None:
    import torch

    if find_spec("triton") is None or not torch.cuda.is_available():
        raise ConfigError(
            "bench kernels: it needs an NVIDIA GPU and Triton, and one of them is not here: `lopa doctor` says which"
        )
