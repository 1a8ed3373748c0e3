"""The door of canvases: texts that stand in an answer, or after it, before the model fills what is between them. And of
answers that do not end too soon, by the same means.

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
from common.requests.formats import limited, most_tokens, refuse_ends
from common.requests.refusal import RequestError
from common.requests.wishes import MOST_GIVEN, Wishes


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
    num_given = sum(len(piece) for piece in wishes.canvas if isinstance(piece, str))
    if num_given > MOST_GIVEN:
        raise RequestError(
            "canvas", f"its texts have {num_given} characters, at most {MOST_GIVEN} may be: shorten them"
        )
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
    no_end = "no end token is filled into a hole"
    refuse_ends(wishes, "what stands after an answer says where it ends", no_end, no_end)
    decode = limited(wishes, decode, "a canvas").model_copy(update={"stop": ()})
    return decode, _any_tokens(0, vocab_size, may_end=False)


def any_text(
    wishes: Wishes, decode: DecodeConfig, vocab_size: int | None, field: str
) -> tuple[DecodeConfig, Automaton]:
    """Return the settings that an answer of any text is decoded by which has no end token before `min_tokens` others,
    and the automaton of these. field: asks for one, min_tokens or logit_bias. Raises RequestError."""
    most = most_tokens(wishes, decode)
    if wishes.min_tokens > most:
        raise RequestError("min_tokens", f"the answer has at most {most} tokens: lower it, or raise max_tokens")
    return limited(wishes, decode, field), _any_tokens(wishes.min_tokens, vocab_size, may_end=True)


def _any_tokens(least: int, vocab_size: int | None, *, may_end: bool) -> Automaton:
    """Return the automaton of all texts of so many tokens or more."""
    if vocab_size is None:
        raise RequestError(None, "the size of this model's vocabulary is not known")
    state_Q = np.arange(least + 1)
    next_QC = np.stack((np.full(least + 1, -1), np.minimum(state_Q + 1, least)), axis=1).astype(np.int32)
    key = f"{least} or more of {vocab_size}, {may_end}"
    return Automaton(
        np.ones(vocab_size, np.int32), next_QC, state_Q == least, 0, key, may_end=may_end,
        is_whole_when_full=not may_end,
    )  # fmt: skip
