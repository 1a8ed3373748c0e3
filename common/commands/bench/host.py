"""`lopa bench host`: what the host computes for a step, without a model."""

from __future__ import annotations

import argparse

import typer

from common.commands.arguments.options import Parser, WholeNumber

_COUNT = WholeNumber(10**5)
# common.bench.host has them too, and takes long to load.
_FAMILIES = ("dream", "llada", "sdar", "llada2", "fast_dllm_v2")


def measure(arguments: list[str]) -> None:
    """Measure the scheduler's time of a step on random predictions, and an engine's before it queues the pass."""
    known = parse(arguments)
    from common.bench import HostOptions, measure_host, measure_marking

    if known.programs is not None:
        typer.echo(measure_marking(known.programs))
        return
    typer.echo(
        measure_host(
            HostOptions(
                known.num_lookahead, known.window, known.requests, known.steps, known.engine, known.ranks, known.family
            )
        )
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    """Ends the process with a usage message where they are wrong."""
    parser = Parser(prog="lopa bench host", description=measure.__doc__)
    parser.add_argument("--num-lookahead", type=WholeNumber(100, 0), default=7, help="lookahead branches")
    parser.add_argument("--window", type=_COUNT, default=96, help="mean positions of a row, about")
    parser.add_argument("--requests", type=_COUNT, default=1, help="requests at once")
    parser.add_argument("--family", choices=_FAMILIES, default="dream", help="the family whose strategy decodes")
    parser.add_argument("--steps", type=_COUNT, default=2000, help="steps to time")
    parser.add_argument(
        "--engine", choices=("lopa_ascend", "lopa_cuda"), help="also time this engine; without it the scheduler alone"
    )
    parser.add_argument("--ranks", type=_COUNT, default=1, help="branch ranks of the engine")
    parser.add_argument(
        "--programs", type=_COUNT, help="instead: what marking so many generated programs takes, one after another"
    )
    return parser.parse_args(arguments)
