"""An answer that is shown while it is filled: on a terminal pass by pass, elsewhere once it is whole."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from common.errors import harmless
from common.processes import show
from common.tables import counted

if TYPE_CHECKING:
    from common.decoding import StepRecord
    from common.generate import Generator

_MASK = "░"
_MOST_ROOM = 6  # rows of the terminal that are kept for what stands above


def answer(generator: Generator, fields: Mapping[str, Any]) -> str:
    """Decode what a line of the run's input with these fields asks for and print it; the text of the answer.

    The answer goes to standard output, its numbers and how it is filled to standard error. Raises ConfigError for a
    prompt that cannot be decoded, EngineError.
    """
    # Here: they load torch, which a wrong argument has no reason to wait for.
    from common.evaluation import request_of, watch
    from common.serving import DenoiseEvents
    from common.text import answer_text

    request = request_of(generator, fields)
    decode = request.decode or generator.run.decode
    told = DenoiseEvents(len(request.prompt), decode, generator.tokenizer.decode, request.given)
    filling = Filling(len(request.prompt))
    console = Console(stderr=True, highlight=False)
    is_shown = console.is_terminal and sys.stdout.isatty()
    with Live(console=console, auto_refresh=False, transient=True) if is_shown else nullcontext() as live:

        def observe(record: StepRecord) -> None:
            filling.take(told.of(record))
            if live is not None:
                live.update(filling.picture(console.width * max(1, console.height - _MOST_ROOM)), refresh=True)

        completion = watch(generator, request, observe)
    if completion is None:
        return ""
    text = answer_text(generator.tokenizer, completion.token_ids, decode)
    show(text.strip("\n"))
    num_tokens, num_passes = len(completion.token_ids), completion.num_forwards
    typer.echo(numbers(num_tokens, num_passes, completion.num_lookahead_wins, completion.total_s), err=True)
    return text


def numbers(num_tokens: int, num_passes: int, num_wins: int, seconds: float) -> str:
    """How an answer came about, in a line."""
    return (
        f"[{counted(num_tokens, 'token')} in {counted(num_passes, 'forward pass', 'es')}, "
        f"{num_tokens / max(1, num_passes):.1f} a pass; a lookahead branch won {counted(num_wins, 'pass', 'es')}; "
        f"{seconds:.2f} s]"
    )


class Filling:
    """The canvas of one answer as its `denoise` events fill it."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length, self._num_positions = prompt_length, 0
        self._text_at: dict[int, str] = {}
        self._last: set[int] = set()

    def take(self, event: Mapping[str, Any]) -> None:
        """Read what a pass brought."""
        brought = {position: text for position, _, text, _ in (*event["filled"], *event["edited"])}
        self._text_at |= brought | {position: text for position, _, text in event.get("given", ())}
        self._last, self._num_positions = set(brought), event["canvas_length"]

    def picture(self, room: int) -> Text:
        """The text so far, a sign for every mask, and what the last pass brought in bold; its end, if room is short."""
        text = Text()
        for position in range(self._prompt_length, self._prompt_length + self._num_positions):
            style = "bold green" if position in self._last else "" if position in self._text_at else "dim"
            text.append(harmless(self._text_at.get(position, _MASK), "\n\t"), style)
        return text[-room:] if len(text) > room else text
