"""`lopa bench`: measure step times. It reads its own arguments, since `--shapes` takes a list."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import typer

from common.commands.options import load_to_run
from common.errors import ConfigError

RAW_ARGUMENTS: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}


def bench(context: typer.Context) -> None:
    """Measure step times by shape and part, beside the device's floors (scripts/bench.sh starts several processes)."""
    known = _parser().parse_args(context.args)
    if known.compare:
        from common.bench import compare

        typer.echo(compare(*(Path(path) for path in known.compare)))
        return
    if known.run is None:
        raise ConfigError("bench: give PROFILE and RUN, or --compare A.json B.json")
    profile, run = load_to_run(known.profile, known.run, known.set)
    from common.bench import BenchOptions, run_bench

    given = {"cases": known.shapes and tuple(known.shapes), "num_steps": known.steps, "num_cached": known.cached}
    chosen = {name: value for name, value in given.items() if value is not None}
    run_bench(profile, run, BenchOptions(**chosen, trace=known.trace, output=known.output))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lopa bench", description=bench.__doc__)
    parser.add_argument("profile", nargs="?")
    parser.add_argument("run", nargs="?")
    parser.add_argument("--compare", nargs=2, metavar=("A.json", "B.json"))
    parser.add_argument("--output", help="JSON file; a table and a plot are written beside it")
    parser.add_argument("--trace", help="recorded acceptance (common.bench.acceptance) for tokens per second")
    parser.add_argument("--shapes", nargs="+", type=_shape, metavar="ROWSxWINDOW", help="single steps to time")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, help="timed steps of each shape")
    parser.add_argument("--cached", type=int, help="prompt length")
    return parser


def _shape(text: str) -> tuple[int, int]:
    rows, width = text.split("x")
    return int(rows), int(width)
