"""`lopa estimate`: predict a step without running it."""

from __future__ import annotations

from math import isfinite
from typing import Annotated

import typer

from common.commands.arguments.found import load_both, profile_here
from common.commands.arguments.options import ModelArgument, OptionalCount, OptionalText, ProfileOption, SetOption
from common.processes import inform


def _finite(value: float) -> float:
    """Refuse nan, which is neither below a bound nor above one, and infinity. Raises BadParameter."""
    if not isfinite(value):
        raise typer.BadParameter("give a number")
    return value


def estimate(
    model: ModelArgument,
    profile: ProfileOption = None,
    set: SetOption = None,
    rows: Annotated[
        OptionalCount,
        typer.Option(min=1, max=10**6, help="Rows of a step, over all bp ranks. Without it k + 1 for each request."),
    ] = None,
    window: Annotated[
        OptionalCount,
        typer.Option(min=1, max=10**7, help="Positions of a row. Without it what is usual for the strategy."),
    ] = None,
    prefix: Annotated[int, typer.Option(min=0, max=10**7, help="Cached positions in front of the window.")] = 1024,
    tpf: Annotated[
        float,
        typer.Option(min=0.1, max=10**4, callback=_finite, help="Tokens per step that the tokens per second assume."),
    ] = 10.0,
    hardware: Annotated[
        OptionalText, typer.Option(help="The device: a YAML file, or a name from configs/hardware.")
    ] = None,
) -> None:
    """Predict the time of one step from its operations, by part; nothing is run and no weights are needed.

    It says what bounds each part, what 8 bits, merging, fusing and overlapping would change, and which mesh of the
    same devices would be fastest. Of the model's files only config.json is read.
    """
    from common.bench import Options, estimate_tables

    if profile is None and hardware is None and profile_here() == "cpu":  # of which no kind is described
        profile, hardware = "cuda", "h200"
        inform(
            "lopa: for one H200, since this machine has no accelerator; --profile and --hardware name others", err=True
        )
    device_profile, run_config = load_both(profile, model, set, with_weights=False)
    options = Options(rows=rows, window=window, prefix=prefix, tokens_per_step=tpf)
    inform(estimate_tables(device_profile, run_config, options, hardware))
