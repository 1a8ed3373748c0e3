"""The door of canvases: texts that stand in an answer, or after it, before the model fills what is between them.

The model sees them from the first pass on where its strategy computes the whole canvas. Pieces are tokenized one by
one, and a hole is as many tokens as it says; no end token is filled into one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from common.config import DecodeConfig
from common.constraints import Automaton
from common.decoding import HOLE
from common.requests.formats import check_decode
from common.requests.refusal import RequestError
from common.requests.wishes import Wishes


class Canvas(NamedTuple):
    """What stands after a prompt. token_ids: HOLE for masks. num_shown: positions that the answer has, from the first
    on."""

    token_ids: tuple[int, ...]
    num_shown: int


def canvas_of(wishes: Wishes, encode: Callable[[str, str], tuple[int, ...]], usual: int, most: int) -> Canvas:
    """Return the canvas that the wishes describe. encode: returns the ids of a text, and blames a field. usual: tokens
    before a suffix where the wishes do not say. most: positions of the model. Raises RequestError."""
    holes = (wishes.max_tokens or usual,) if wishes.canvas is None else wishes.canvas
    if sum(piece for piece in holes if isinstance(piece, int)) > most:
        field = "max_tokens" if wishes.canvas is None else "canvas"
        raise RequestError(field, f"its masks are more than the model's context of {most} tokens: take fewer")
    if wishes.suffix is not None:
        if wishes.canvas is not None:
            raise RequestError("suffix", "canvas says what stands after the answer: remove one of the two")
        count = wishes.max_tokens or usual
        return Canvas((HOLE,) * count + encode(wishes.suffix, "suffix"), count)
    assert wishes.canvas is not None, "the caller has looked"
    if wishes.max_tokens is not None:
        raise RequestError("max_tokens", "canvas says how long the answer is: remove one of the two")
    token_ids: list[int] = []
    for piece in wishes.canvas:
        token_ids += encode(piece, "canvas") if isinstance(piece, str) else (HOLE,) * piece
    if HOLE not in token_ids:
        raise RequestError("canvas", "it has no hole: write one as {'mask': 8}, with its number of tokens")
    return Canvas(tuple(token_ids), len(token_ids))


def held(wishes: Wishes, decode: DecodeConfig, vocab_size: int | None) -> tuple[DecodeConfig, Automaton]:
    """Return the settings that such a canvas is decoded by, and the automaton that keeps end tokens out of it. Raises
    RequestError."""
    field, strategy = wishes.canvas_field, decode.strategy
    if not strategy.sees_whole_canvas or decode.window_attention != "full":
        raise RequestError(
            field,
            f"strategy {strategy.name} does not show the model what stands after the block that it fills: decode with "
            "fast_dllm, multi_block or vanilla, or write the text into the prompt",
        )
    if wishes.format is not None:
        raise RequestError(field, f"{wishes.format_field} says what the answer is held to: remove one of the two")
    for name in ("stop", "stop_token_ids"):
        if wishes.settings.get(name):
            raise RequestError(name, "what stands after an answer says where it ends: remove it")
    if wishes.ignore_eos:
        raise RequestError("ignore_eos", "no end token is filled into a hole: remove it")
    check_decode(decode, "a canvas")
    if vocab_size is None:
        raise RequestError(field, "the size of this model's vocabulary is not known")
    class_V, next_QC = np.ones(vocab_size, np.int32), np.array([[-1, 0]], np.int32)
    anything = Automaton(class_V, next_QC, np.ones(1, np.bool_), 0, f"any of {vocab_size}", may_end=False)
    return decode.model_copy(update={"stop": ()}), anything
