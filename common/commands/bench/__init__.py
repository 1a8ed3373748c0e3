"""`lopa bench steps | host | load | kernels`: one module each. They read their own arguments, since some take lists."""

from __future__ import annotations

import shlex

import typer

from common.commands.bench import host, kernels, load, steps
from common.errors import ConfigError

MEASURES = {"steps": steps, "host": host, "load": load, "kernels": kernels}
_USAGE = """usage: lopa bench {steps,host,load,kernels} ...

  steps     times of single steps and of whole decoding steps by part, beside the device's floors
  host      the scheduler's own time of a step, without a model
  load      tokens per second of many requests at once, over HTTP too
  kernels   the CUDA kernels at Dream-7B's shapes

`lopa bench WHAT --help` explains the options of each."""


def bench(context: typer.Context) -> None:
    """Measure steps, the host's part of them, many requests at once, or the CUDA kernels: `lopa bench --help`."""
    arguments = context.args
    if not arguments or arguments[0] in ("-h", "--help"):
        typer.echo(_USAGE, err=not arguments)
        raise typer.Exit(0 if arguments else 2)
    if arguments[0] not in MEASURES:
        raise ConfigError(
            f"bench {arguments[0]}: say first what to measure, one of {', '.join(MEASURES)}; "
            f"this is now `lopa bench steps {shlex.join(arguments)}`"
        )
    MEASURES[arguments[0]].measure(arguments[1:])
