"""`lopa demo`: the shipped model on problems that it has not seen, with and without lookahead."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.commands.options import GeneratorOnDemand, OptionalText, SetOption, make_ready
from common.config import find_config, load_sweep
from common.errors import ConfigError

_PROBLEMS = "heldout_math.jsonl"
_BEFORE = "Word problems that the model has not seen, decoded twice: without and with lookahead branches."
_AFTER = """
Lookahead needs fewer forward passes for the same answers, each of k + 1 times the arithmetic. A GPU or NPU has that to
spare while it reads the weights; a CPU has not, so watch TPF and steps here rather than seconds."""


def demo(
    model: Annotated[OptionalText, typer.Option(metavar="DIR", help="The demo model's folder, if not here.")] = None,
    num_problems: Annotated[int, typer.Option(min=1, help="Problems to solve with each setting.")] = 60,
    profile: Annotated[str, typer.Option("--profile", "-p", help="What runs the model.")] = "cpu",
    set: SetOption = None,
) -> None:
    """Watch the shipped model solve word problems, with and without lookahead branches."""
    from common.evaluation import evaluate_sweep

    folder = Path(model or "models/demo")
    if not (folder / _PROBLEMS).is_file():
        raise ConfigError(
            f"{folder}: no {_PROBLEMS} there: the demo model comes with a checkout of this project; start this there, "
            "or name the folder with --model"
        )
    own = [f"model={folder}", f"input.path={folder / _PROBLEMS}", f"input.limit={num_problems}"]
    sweep = load_sweep(find_config("sweeps", "demo"), profile, "demo", [*own, *(set or [])])
    (launch,) = sweep.launches
    make_ready(launch.profile)
    typer.echo(_BEFORE, err=True)
    with GeneratorOnDemand(launch.profile, launch.run) as build:
        evaluate_sweep(sweep, build, overwrite=True, num_shown=3)
    typer.echo(_AFTER)
