"""`lopa trace`: one prompt, and what every forward pass did to its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from common.commands.options import GeneratorOnDemand, SetOption, load_to_run
from common.errors import ConfigError

_OptionalPath = Optional[Path]  # noqa: UP045  typer reads this at run time, on Python 3.10 too


def trace(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to answer, as a question of the run.")],
    html: Annotated[_OptionalPath, typer.Option("--html", help="Write a page that replays the passes.")] = None,
    json_file: Annotated[_OptionalPath, typer.Option("--json", help="Write the passes as JSON.")] = None,
    profile: Annotated[str, typer.Option("--profile", "-p", help="What runs the model.")] = "cpu",
    run: Annotated[str, typer.Option("--run", help="The model and how it decodes: a run file or its name.")] = "demo",
    set: SetOption = None,
) -> None:
    """Decode one prompt and show which pass filled which position, and which branch won.

    The page is one file without anything external: it plays, steps back and forth, and can be sent to others.
    """
    files = _output_files({"--html": html, "--json": json_file})
    device_profile, run_config = load_to_run(profile, run, set)
    from common.evaluation import record_trace

    with GeneratorOnDemand(device_profile, run_config) as build:
        recorded = record_trace(build(), prompt)
    if recorded is None:  # another rank writes
        return
    _write(files, recorded)
    _print_summary(recorded)
    for path in files.values():
        typer.echo(f"written: {path}", err=True)


def _output_files(files: Mapping[str, Path | None]) -> dict[str, Path]:
    """Where the files of these options really lie; options without one are left out.

    Raises ConfigError for a place that cannot be written, and for two options of one file.
    """
    from common.batch import real_file, require_file

    found = {option: real_file(path) for option, path in files.items() if path is not None}
    for option, path in found.items():
        require_file(option, path)
    if len({path.resolve() for path in found.values()}) < len(found):
        raise ConfigError(f"{' and '.join(found)} name the same file: choose two")
    return found


def _write(files: Mapping[str, Path], recorded: Mapping[str, Any]) -> None:
    from common.batch import write_whole
    from common.serving import trace_page

    if "--html" in files:
        write_whole(files["--html"], trace_page(recorded))
    if "--json" in files:
        write_whole(files["--json"], json.dumps(recorded, ensure_ascii=False, allow_nan=False) + "\n")


def _print_summary(recorded: Mapping[str, Any]) -> None:
    """The answer on standard output, its numbers beside it."""
    typer.echo(recorded["answer"]["text"].strip("\n"))
    num_passes, num_tokens = len(recorded["events"]), recorded["answer"]["length"]
    typer.echo(
        f"{num_tokens} tokens in {num_passes} passes, {num_tokens / num_passes:.2f} a pass, "
        f"{recorded['num_lookahead_wins']} passes won by a lookahead, {recorded['seconds'][-1]:.2f} s",
        err=True,
    )
