"""`lopa evaluate`: several settings on one input. `lopa lm-eval`: lm-eval's own command line with our model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from common.commands.arguments.found import profile_here
from common.commands.arguments.options import (
    MODEL_HELP,
    AllowCodeOption,
    GeneratorOnDemand,
    OverwriteOption,
    ProfileOption,
    SetOption,
    allowing,
    load_to_run,
    make_ready,
)
from common.config import Sweep, SweepLaunch, find_config, load_sweep
from common.errors import ConfigError

if TYPE_CHECKING:
    from common.generate import Generator

_Names = Optional[list[str]]  # noqa: UP045  typer reads this at run time, on Python 3.10 too


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} - takes the run that the sweep names.")],
    sweep: Annotated[
        str, typer.Argument(metavar="SWEEP", help="Settings to compare: a YAML file, or a name from configs/sweeps.")
    ],
    profile: ProfileOption = None,
    set: SetOption = None,
    row: Annotated[_Names, typer.Option("--row", metavar="NAME", help="Run this row only. Repeatable.")] = None,
    overwrite: OverwriteOption = False,
    allow_code_execution: AllowCodeOption = False,
    show: Annotated[int, typer.Option(min=0, help="Print this many solved problems of the last setting.")] = 0,
) -> None:
    """Decode one input under several settings and print a row for each: accuracy, TPF, steps, TPS, latency.

    The model is loaded once. Every setting has its own output file in a folder named after output.path, so a stopped
    sweep goes on where it was. scripts/sweep.sh goes on with the other settings if one fails, and takes sweeps that
    name several profiles.
    """
    chosen = load_sweep(
        find_config("sweeps", sweep), profile, model, allowing(set, allow_code_execution), row or (), profile_here()
    )
    launch = _only_launch(chosen)
    make_ready(launch.profile, "scripts/sweep.sh")
    from common.evaluation import evaluate_sweep

    settings = {point.name: point.run.decode for point in launch.points}
    with GeneratorOnDemand(launch.profile, launch.run, settings, chosen.path) as build:
        evaluate_sweep(chosen, build, overwrite=overwrite, num_shown=show)


def _only_launch(sweep: Sweep) -> SweepLaunch:
    if len(sweep.launches) > 1:
        names = " and ".join(f"{launch.points[0].name!r}" for launch in sweep.launches)
        raise ConfigError(
            f"{sweep.path}: {names} need models or devices of their own: start it with scripts/sweep.sh, which starts "
            "one after the other, or choose rows by --row"
        )
    return sweep.launches[0]


def lm_eval(context: typer.Context) -> None:
    """Start lm-eval (extra `eval`) with this engine as --model lopa --model_args run=MODEL."""
    from common.evaluation import drive

    drive(context.args, _build)


def _build(profile: str | None, run: str, overrides: list[str]) -> Generator:
    from common.generate import build_generator

    return build_generator(*load_to_run(profile, run, overrides))
