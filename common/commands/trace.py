"""`lopa trace`: one prompt, and what every forward pass did to its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from common.commands.arguments.options import (
    MODEL_HELP,
    GeneratorOnDemand,
    OptionalText,
    ProfileOption,
    SetOption,
    load_to_run,
)
from common.commands.filling import numbers
from common.config import find_config
from common.errors import ConfigError
from common.processes import inform, show
from common.tables import counted

_OptionalPath = Optional[Path]  # noqa: UP045  typer reads this at run time, on Python 3.10 too
_KEYS: dict[str, tuple[str, ...]] = {"--html": (), "--json": ("events", "num_lookahead_wins")}


def trace(
    model_or_prompt: Annotated[
        OptionalText, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} demo if not given.")
    ] = None,
    prompt: Annotated[OptionalText, typer.Argument(metavar="PROMPT", help="The text to answer.")] = None,
    html: Annotated[_OptionalPath, typer.Option("--html", help="Write a page that replays the passes.")] = None,
    json_file: Annotated[_OptionalPath, typer.Option("--json", help="Write the passes as JSON.")] = None,
    profile: ProfileOption = None,
    set: SetOption = None,
) -> None:
    """Decode one prompt and show which pass filled which position, and which branch won.

    The page is one file without anything external: it plays, steps back and forth, and can be sent to others.
    """
    files = _output_files({"--html": html, "--json": json_file})
    model, asked = _model_and_prompt(model_or_prompt, prompt)
    device_profile, run_config = load_to_run(profile, model, set)
    from common.evaluation import record_trace

    with GeneratorOnDemand(device_profile, run_config) as build:
        recorded = record_trace(build(), asked)
    if recorded is None:  # another rank writes
        return
    _write(files, recorded)
    _print_summary(recorded)
    for path in files.values():
        inform(f"written: {path}", err=True)


def _model_and_prompt(first: str | None, second: str | None) -> tuple[str, str]:
    """Raises ConfigError where nothing is to be answered."""
    if first is not None and second is not None:
        return first, second
    if first is None or _is_model(first):
        given = "" if first is None else f" {first}"
        raise ConfigError(f"trace{given}: give the text to answer: lopa trace{given} 'What is 2 + 3?' --html out.html")
    return "demo", first


def _is_model(name: str) -> bool:
    try:
        find_config("runs", name)
    except ConfigError:
        return False
    return True


def _output_files(files: Mapping[str, Path | None]) -> dict[str, Path]:
    """Find where the files of these options really lie; options without one are left out.

    Raises ConfigError for a place that cannot be written, another file there, and two options of one file.
    """
    from common.batch import result_file

    found = {option: result_file(option, path, *_KEYS[option]) for option, path in files.items() if path is not None}
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
    """The answer on standard output; a line a pass and the numbers beside it."""
    for event in recorded["events"]:
        inform(_pass(event), err=True)
    show(recorded["answer"]["text"].strip("\n"))
    num_tokens, num_passes = recorded["answer"]["length"], len(recorded["events"])
    wins = recorded["num_lookahead_wins"]
    inform(numbers(num_tokens, num_passes, wins, recorded["seconds"][-1]), err=True)


def _pass(event: Mapping[str, Any]) -> str:
    """Which branch won a pass, and the text that it filled, in the order of the positions."""
    num_lookahead = len(event["branch_scores"]) - 1
    winner = "the anchor" if event["winner"] == num_lookahead else f"lookahead {event['winner'] + 1} of {num_lookahead}"
    brought = sorted((*event["filled"], *event["edited"]))
    text = "".join(text for _, _, text, _ in brought)
    moves = [f", {len(event[what])} {what}" for what in ("deleted", "inserted") if event.get(what)]
    return f"pass {event['pass']}: {winner} won, {counted(len(brought), 'token')}{''.join(moves)}: {text!r:.90}"
