"""`lopa bench steps`: times of steps by shape and part."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common.commands.arguments.options import Parser, WholeNumber, add_model_and_settings, load_to_run
from common.errors import ConfigError
from common.processes import global_rank, inform

_COUNT = WholeNumber(10**6)
# A CPU takes minutes for what a GPU does in seconds: this much unless options say more, and no mixes.
_ON_CPU: dict[str, Any] = {"shapes": [(1, 32), (1, 64), (8, 32), (8, 64)], "steps": 5, "requests": 1}


def measure(arguments: list[str]) -> None:
    """Measure step times by shape and part, beside the device's floors (scripts/bench.sh starts several processes)."""
    known = parse(arguments)
    if known.compare:
        from common.bench import compare

        inform(compare(*(Path(path) for path in known.compare)))
        return
    if known.model is None:
        raise ConfigError("bench steps: give MODEL, or --compare A.json B.json")
    profile, run = load_to_run(known.profile, known.model, known.set, "scripts/bench.sh")
    # Here: it loads torch, which a wrong argument has no reason to wait for.
    from common.batch import result_file
    from common.bench import BenchOptions, run_bench
    from common.checkpoint import load_model_config
    from common.runtime import longest_request

    most = longest_request(profile, load_model_config(run.model))
    if known.cached is None:  # a prompt of the usual length, or of a quarter of a small model's positions
        known.cached = min(BenchOptions().num_cached, most // 4)
    if profile.device == "cpu":
        known.no_mixes = True
        for name, value in _ON_CPU.items():
            setattr(known, name, getattr(known, name) or value)
    _check(known, most)
    if known.output is not None and global_rank() == 0:
        result_file("--output", Path(known.output), "conditions", "shapes", beside=".md")
    if known.profile_trace is not None:
        make_folder(Path(known.profile_trace))
    given = {
        "cases": known.shapes and tuple(known.shapes), "num_steps": known.steps, "num_cached": known.cached,
        "num_requests": known.requests, "accepted": known.accepted and tuple(known.accepted),
    }  # fmt: skip
    chosen = {name: value for name, value in given.items() if value is not None}
    if known.no_mixes:
        chosen["mixes"] = ()
    run_bench(profile, run, BenchOptions(**chosen, output=known.output, trace=known.profile_trace))


def make_folder(path: Path) -> None:
    """Make the folder before anything is measured, on every rank. Raises ConfigError where there can be none, and for
    other files with the names of what is written there."""
    from common.batch import result_file

    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--profile-trace {path}: no folder can be made there ({error.strerror}); name another"
        ) from None
    result_file("--profile-trace", path / "trace.json", "traceEvents")
    result_file("--profile-trace", path / "kernels.txt", begin=b"---")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Ends the process with a usage message where they are wrong."""
    parser = Parser(prog="lopa bench steps", description=measure.__doc__)
    add_model_and_settings(parser, nargs="?")
    parser.add_argument("--compare", nargs=2, metavar=("A.json", "B.json"),
                        help="measure nothing, but set two result files side by side")  # fmt: skip
    parser.add_argument("--output", help="JSON file; a table is written beside it, and `lopa report` draws it")
    parser.add_argument(
        "--profile-trace", metavar="FOLDER", help="also trace ten steps of the first shape: by Perfetto, and by kernel"
    )
    parser.add_argument(
        "--shapes", nargs="+", type=_shape, metavar="ROWSxWINDOW", help="single steps to time, such as 1x64 8x128"
    )
    parser.add_argument("--no-mixes", action="store_true", help="leave out the steps over windows of several widths")
    parser.add_argument("--steps", type=_COUNT, help="timed steps of each shape")
    parser.add_argument("--cached", type=_COUNT, help="tokens of the prompt, which are cached")
    parser.add_argument("--requests", type=_COUNT, help="requests of each section of decoding steps")
    parser.add_argument(
        "--accepted", nargs="+", type=_COUNT, metavar="N", help="tokens a step of each section of decoding steps: 3 6 9"
    )
    return parser.parse_args(arguments)


def _shape(text: str) -> tuple[int, int]:
    rows, _, width = text.partition("x")
    return _COUNT(rows), _COUNT(width)


def _check(known: argparse.Namespace, most: int) -> None:
    """ConfigError where the longest window does not fit after the prompt."""
    from common.bench import BenchOptions

    options = BenchOptions()
    widths = [width for _, width in known.shapes or options.cases]
    mixed = [] if known.no_mixes else [width for _, widths in options.mixes for width in widths]
    widest = max([*widths, *mixed])
    if known.cached + widest > most:
        raise ConfigError(
            f"bench steps: {known.cached} cached positions and windows of up to {widest} do not fit into {most}, the "
            "least of max_model_len and the model's positions: lower --cached, or use a model with more positions"
        )
