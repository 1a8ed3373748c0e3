"""`lopa chat`: ask a model on the terminal and watch its answers being filled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import typer

from common.commands.arguments.options import GeneratorOnDemand, ModelArgument, ProfileOption, SetOption, load_to_run
from common.commands.filling import answer
from common.errors import ConfigError


def chat(model: ModelArgument, profile: ProfileOption = None, set: SetOption = None) -> None:
    """Ask a model on the terminal and watch its answers being filled; Ctrl-D ends it.

    A model with a chat template remembers the conversation. One whose run has a prompt template, such as demo, takes
    every line by itself. Through a pipe each line is a prompt, and only whole answers are printed.
    """
    if sys.stdin is None:
        raise ConfigError("chat: standard input is closed: give prompts there, one a line")
    device_profile, run = load_to_run(profile, model, set)
    with GeneratorOnDemand(device_profile, run) as build:
        generator = build()
        is_alone = run.input is not None and run.input.prompt_template is not None
        remembers = not is_alone and generator.requests.prompts.takes_chats
        messages: list[dict[str, Any]] = []
        for prompt in _prompts():
            messages.append({"role": "user", "content": prompt})
            try:
                text = answer(generator, {"messages": messages} if remembers else {"question": prompt})
            except ConfigError as error:  # of this prompt; the next may be answered
                typer.echo(f"lopa: {error}", err=True)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": text})


def _prompts() -> Iterator[str]:
    """What the user types, or the lines of a pipe, without those that are empty."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  lines can be edited
    while True:
        try:
            line = input("> ") if is_terminal else sys.stdin.readline()
        except EOFError:
            return
        except UnicodeDecodeError:
            raise ConfigError("chat: standard input is no text in UTF-8: convert it") from None
        if not line and not is_terminal:
            return
        if line.strip():
            yield line.strip()
