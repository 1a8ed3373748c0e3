"""`lopa demo`: the shipped model on problems that it has not seen, with and without lookahead."""

from __future__ import annotations

from typing import Annotated

import typer

from common.commands.arguments.found import profile_here
from common.commands.arguments.options import GeneratorOnDemand, ProfileOption, SetOption, make_ready
from common.config import find_config, load_profile, load_sweep

# Answers without a slip of the pen: the model has 7.7 M parameters, and others call Jon Omar.
_SHOWN = ("math-0003", "math-0005", "math-0023")
_BEFORE = """\
{count} word problems that the model has not seen, decoded twice: plainly (k = 0), and with k = 7 lookahead branches.
Every pass then also tries seven other orders of filling, and the best one is kept. Watch two numbers:
  accuracy  the share of right answers: lookahead should not cost any
  TPF       tokens per forward pass: with lookahead the same answers should take far fewer passes
Seconds{of_cpu}.
"""
_ON_CPU = """ favour k = 0 here: a pass over k + 1 branches has k + 1 times the arithmetic. A CPU takes longer for that;
a GPU or NPU does not, since it waits for the weights to be read anyway"""
_ELSEWHERE = " and TPS (tokens per second) depend on how many requests share a pass, here {at_once}"


def demo(
    num_problems: Annotated[int, typer.Option(min=1, help="Problems to solve with each setting.")] = 60,
    profile: ProfileOption = None,
    set: SetOption = None,
) -> None:
    """Watch the shipped model solve word problems, with and without lookahead branches."""
    own = [f"input.limit={num_problems}", *(set or [])]
    name = profile or profile_here()
    run = "demo_block_causal" if load_profile(name).engine == "lopa_ascend" else "demo"
    sweep = load_sweep(find_config("sweeps", "demo"), name, run, own)
    (launch,) = sweep.launches
    make_ready(launch.profile)
    seconds = _ON_CPU if launch.profile.device == "cpu" else _ELSEWHERE.format(at_once=launch.run.max_num_requests)
    typer.echo(_BEFORE.format(count=num_problems, of_cpu=seconds), err=True)
    # Here: it loads torch, for seconds that should not be silent.
    from common.evaluation import evaluate_sweep

    with GeneratorOnDemand(launch.profile, launch.run) as build:
        evaluate_sweep(sweep, build, overwrite=True, num_shown=len(_SHOWN), shown_first=_SHOWN)
    typer.echo("Ask it yourself: lopa chat demo. Watch an answer being filled as a page: lopa serve demo")
