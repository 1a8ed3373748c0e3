"""`lopa evaluate`: several decode settings on one input."""

from __future__ import annotations

from typing import Annotated

import typer

from common.commands.options import (
    GeneratorOnDemand,
    OverwriteOption,
    ProfileOption,
    RunArgument,
    SetOption,
    load_to_run,
)
from common.config import find_config, load_sweep


def evaluate(
    run: RunArgument,
    sweep: Annotated[str, typer.Argument(metavar="SWEEP", help="Settings to compare: a YAML file of configs/sweeps.")],
    profile: ProfileOption,
    set: SetOption = None,
    overwrite: OverwriteOption = False,
    show: Annotated[int, typer.Option(min=0, help="Print this many solved problems of the last setting.")] = 0,
) -> None:
    """Decode one input under several settings and print a row for each: accuracy, TPF, steps, TPS, latency.

    The model is loaded once. Every setting has its own output file in a folder named after output.path, so a sweep
    that was stopped goes on where it was.
    """
    from common.evaluation import evaluate_sweep

    device_profile, run_config = load_to_run(profile, run, set)
    settings = load_sweep(find_config("sweeps", sweep), run_config.decode)
    with GeneratorOnDemand(device_profile, run_config) as build:
        evaluate_sweep(device_profile, run_config, settings, build, overwrite=overwrite, num_shown=show)
