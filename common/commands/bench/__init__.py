"""`lopa bench steps | host | load | kernels`: one module each. They read their own arguments, since some take lists."""

from __future__ import annotations

import typer

from common.commands.bench import host, kernels, load, steps
from common.config import find_config
from common.errors import ConfigError, did_you_mean

MEASURES = {"steps": steps, "host": host, "load": load, "kernels": kernels}
_USAGE = """usage: lopa bench [steps] MODEL ...
       lopa bench {host,load,kernels} ...

  steps     times of single steps and of whole decoding steps by part, beside the device's floors
  host      the scheduler's own time of a step, without a model
  load      tokens per second of many requests at once, over HTTP too
  kernels   the CUDA kernels at Dream-7B's shapes

`lopa bench WHAT --help` explains the options of each; `lopa bench MODEL` is `lopa bench steps MODEL`."""


def bench(context: typer.Context) -> None:
    """Measure steps, the host's part of them, many requests at once, or the CUDA kernels: `lopa bench --help`."""
    arguments = context.args
    if not arguments or arguments[0] in ("-h", "--help"):
        typer.echo(_USAGE, err=not arguments)
        raise typer.Exit(0 if arguments else 2)
    what, *others = arguments if arguments[0] in MEASURES else ["steps", *_model_first(arguments)]
    MEASURES[what].measure(others)


def _model_first(arguments: list[str]) -> list[str]:
    """The arguments, of which the first names no measure. Raises ConfigError where it names no model either, but looks
    like a measure."""
    hint = did_you_mean(arguments[0], list(MEASURES))
    if hint:
        try:
            find_config("runs", arguments[0])
        except ConfigError:
            raise ConfigError(f"bench {arguments[0]}: no such measure, and no model; {hint}".rstrip()) from None
    return arguments
