"""`lopa bench load`: tokens per second at several numbers of requests at once."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from common.commands.arguments.found import load_both, profile_here
from common.commands.arguments.options import Parser, WholeNumber, add_model_and_settings, make_ready
from common.config import Sweep, find_config, load_sweep
from common.errors import ConfigError
from common.processes import inform

_AT_ONCE = WholeNumber(10**4)
_LOOKAHEAD = WholeNumber(100, 0)
_PACES = ("careful", "balanced", "fast")
_OF_WEIGHTS = "model", "tokenizer", "load_format", "preset", "lora_path"


def measure(arguments: list[str]) -> None:
    """Measure tokens per second at several numbers of requests at once, in one process.

    Without --answers MODEL answers itself, and all prompts of its run are decoded twice. With --answers MODEL is timed
    (dummy weights will do), while model, settings and input of the other run decide which tokens are accepted; --set
    is for both, but for what says which weights MODEL has. With --http clients also ask a server for the same answers.
    """
    known = parse(arguments)
    _check(known)
    from common.batch import result_file, write_whole

    output = None if known.output is None else result_file("--output", known.output, "loads")
    profile, run = load_both(known.profile, known.model, known.set)
    answers = load_both(known.profile, known.answers, _of_answers(known))[1] if known.answers else run
    make_ready(profile)
    from common.bench import LoadOptions, Setting, measure_requests, measure_serving, measure_throughput

    chosen = {"lookahead": ("0", "3", "7")} if known.http else {}
    if known.lookahead:
        chosen = {"lookahead": tuple(known.lookahead)}
    points = [] if known.sweep is None else _sweep(known).points
    settings = tuple(Setting(each.name, each.run.decode, each.run.pace) for each in points)
    options = LoadOptions(
        tuple(known.at_once), settings=settings, num_prompts=known.limit or 300, port=known.port, **chosen
    )
    if known.answers is None:
        result = measure_requests(profile, run, options)
    else:
        result = (measure_serving if known.http else measure_throughput)(profile, run, answers, options)
    inform(result.table)
    if output is not None:
        write_whole(output, json.dumps(result.content, indent=2) + "\n")


def _sweep(known: argparse.Namespace) -> Sweep:
    return load_sweep(
        find_config("sweeps", known.sweep), known.profile, known.answers, _of_answers(known), (), profile_here()
    )


def _of_answers(known: argparse.Namespace) -> list[str]:
    """Return the settings given that hold for the run whose model answers, too."""
    return [given for given in known.set or () if given.partition("=")[0].strip() not in _OF_WEIGHTS]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Ends the process with a usage message where they are wrong."""
    parser = Parser(
        prog="lopa bench load", description=measure.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_and_settings(parser)
    parser.add_argument("--answers", metavar="RUN", help="the run whose model answers")
    parser.add_argument("--http", action="store_true", help="also measure a server, beside the engine without HTTP")
    parser.add_argument("--at-once", type=_AT_ONCE, nargs="+", default=[1, 4, 16, 64], metavar="N",
                        help="numbers of requests at once; 1 4 16 64 if not given")  # fmt: skip
    parser.add_argument(
        "--lookahead", type=_lookahead, nargs="+", metavar="K",
        help="numbers of lookaheads, and without --http paces: 0 3 7 balanced if not given",
    )  # fmt: skip
    parser.add_argument(
        "--sweep", metavar="SWEEP", help="measure the settings of this sweep's rows instead of --lookahead"
    )
    parser.add_argument(
        "--limit", type=_AT_ONCE, metavar="N", help="prompts that MODEL answers itself: 300 if not given"
    )
    parser.add_argument("--port", type=WholeNumber(65535), default=8123, help="port of the server that is measured")
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser.parse_args(arguments)


def _lookahead(text: str) -> str:
    return text if text in _PACES else str(_LOOKAHEAD(text))


def _check(known: argparse.Namespace) -> None:
    """Check the options before anything is loaded. Raises ConfigError."""
    if known.answers is None and (known.http or known.lookahead or known.sweep):
        option = "--http" if known.http else "--lookahead" if known.lookahead else "--sweep"
        raise ConfigError(f"bench load: {option} is for a model whose answers another one gives: add --answers RUN")
    if known.answers is not None and known.limit:
        raise ConfigError("bench load: with --answers the load says how many prompts there are: leave out --limit")
    if known.sweep and (known.http or known.lookahead):
        raise ConfigError("bench load: --sweep names all settings: leave out --http and --lookahead")
    if known.http and not set(_PACES).isdisjoint(known.lookahead or ()):
        raise ConfigError("bench load: with --http --lookahead takes numbers: a pace is set by --set pace=balanced")
