"""The `lopa` command: one module a subcommand, each of which only reads its arguments and calls what does the work."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from common.commands.arguments.options import RAW_ARGUMENTS
from common.commands.arguments.plain_help import PlainCommand, PlainGroup, help
from common.commands.arguments.shorthands import AT_ONCE, LIMIT, OUTPUT, with_shorthands
from common.commands.bench import bench
from common.commands.chat import chat
from common.commands.demo import demo
from common.commands.doctor import doctor
from common.commands.evaluate import evaluate, lm_eval
from common.commands.parity import parity
from common.commands.quantize.command import quantize
from common.commands.report.command import report
from common.commands.run import run
from common.commands.serve import serve
from common.commands.speed.estimate import estimate
from common.commands.speed.tune import tune
from common.commands.trace import trace
from common.errors import ConfigError, EngineError, what_failed
from common.processes import (
    Stopped,
    die_with_launcher,
    drop_unwritten,
    end,
    end_undisturbed,
    log_to_stderr,
    say,
    shown_rank,
    stop_on_signals,
    write_error_file,
)
from common.version import LOPA_VERSION
from quant.errors import QuantizationError

app = typer.Typer(
    name="lopa",
    help="Decode text with diffusion language models, several lookahead branches at a time (LoPA).\n\n"
    "MODEL is a model's folder, hf://OWNER/NAME, or demo (it ships); or a run, which names a model with its "
    "settings: a YAML file, or a name from configs/runs. --profile says what runs it, else this machine's.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=PlainGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "run": with_shorthands(run, AT_ONCE, LIMIT, OUTPUT),
    "chat": with_shorthands(chat),
    "serve": with_shorthands(serve, AT_ONCE),
    "trace": with_shorthands(trace),
    "evaluate": with_shorthands(evaluate, AT_ONCE, LIMIT),
    "report": report,
    "estimate": with_shorthands(estimate, AT_ONCE),
    "doctor": doctor,
    "quantize": quantize,
    "parity": parity,
    "help": help,
}
for _name, _command in _COMMANDS.items():
    app.command(_name, cls=PlainCommand)(_command)
for _name, _command in {"bench": bench, "tune": tune, "lm-eval": lm_eval}.items():
    app.command(_name, cls=PlainCommand, **RAW_ARGUMENTS)(_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lopa {LOPA_VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def fail(sentence: str) -> int:
    """Say why this process ends, as one line, also to the launcher if there is one; the exit code."""
    write_error_file(sentence)
    rank = shown_rank()
    where = "" if rank is None else f"rank {rank}: "
    say(f"{where}{sentence}")
    return 2


def open_standard_streams() -> None:
    """Give descriptors 0, 1 and 2 something to lead to where they are closed: a file or a socket that is opened later
    would take their place, and get what is meant for the terminal. `sys.stdin` stays None then."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:  # the lowest that is free
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def main() -> None:
    """The console script: errors of users and machines end in one sentence; only defects show a traceback."""
    open_standard_streams()
    try:
        Path.cwd()
    except FileNotFoundError:  # torch, for one, would call itself broken
        sys.exit(fail("the working directory was deleted: change to another one"))
    # With torch-npu installed but no CANN, importing torch would fail with torch-npu's traceback; engines import it.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    die_with_launcher()
    stop_on_signals()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a text or a name that the terminal cannot show is no reason to end
        sys.stdout.reconfigure(errors="backslashreplace")
    is_first = shown_rank() in (None, "0")
    level = logging.INFO if is_first else logging.WARNING
    log_to_stderr()
    for package in ("common", "graphs", "quant", "lopa_cuda", "lopa_ascend"):
        logging.getLogger(package).setLevel(level)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # a full disk is an error like any other
    except Stopped as stopped:  # which has silenced further signals
        if not stopped.is_reported and is_first:
            say(str(stopped))
        sys.exit(stopped.exit_code)
    except (ConfigError, QuantizationError, EngineError, OSError) as error:
        end_undisturbed()  # before the sentence is written
        if os.environ.get("LOPA_TRACEBACK", "0") not in ("", "0"):
            traceback.print_exc()
        end(fail(what_failed(error)))
    finally:
        end_undisturbed()
        drop_unwritten()
