"""Canvases and least lengths at the door: what they come to, and what is refused in which sentence."""

from __future__ import annotations

from typing import Any

import pytest

from common.config import DecodeConfig
from common.decoding import HOLE
from common.requests import RequestError, Wishes
from common.requests.canvases import any_text, canvas_of, held

DECODE = DecodeConfig.model_validate({"strategy": "fast_dllm", "sampling_strategy": "neg_entropy"})


def encode(text: str, _: str) -> tuple[int, ...]:
    return tuple(text.encode())


def made(decode: DecodeConfig = DECODE, **given: Any) -> tuple[int, ...]:
    wishes = Wishes.read(given)
    canvas = canvas_of(wishes, encode, 7, 100)
    held(wishes, decode, 300)
    return canvas.token_ids


def test_a_suffix_stands_after_as_many_masks_as_the_answer_has_tokens() -> None:
    assert made(suffix="ab", max_tokens=3) == (HOLE, HOLE, HOLE, 97, 98)
    assert made(suffix="a") == (*(HOLE,) * 7, 97)
    assert canvas_of(Wishes.read({"suffix": "ab", "max_tokens": 3}), encode, 7, 100).num_shown == 3


def test_pieces_come_in_their_order() -> None:
    wishes = Wishes.read({"canvas": ["a", {"mask": 2}, "", "b", {"mask": 1}]})
    assert canvas_of(wishes, encode, 7, 100) == ((97, HOLE, HOLE, 98, HOLE), 5)


def test_no_suffix_is_none() -> None:
    assert Wishes.read({"suffix": ""}) == Wishes.read({}) == Wishes.read({"suffix": None})


def test_the_run_s_stop_strings_do_not_cut_a_canvas() -> None:
    decode, automaton = held(Wishes.read({"suffix": "a"}), DECODE.changed({"stop": ("b",)}), 300)
    assert decode.stop == () and automaton.closed([5]).next_QC[0].tolist() == [-1, 0, -1]


@pytest.mark.parametrize(
    ("given", "settings", "sentence"),
    [
        ({"canvas": ["a"]}, {}, "canvas: it has no hole: write one as {'mask': 8}, with its number of tokens"),
        ({"canvas": []}, {}, "canvas: "),
        ({"canvas": [{"mask": 0}]}, {}, "canvas.0: write a text, or {'mask': 8} for a hole of 8 tokens (given {"),
        ({"canvas": ["a", {"masks": 1}]}, {}, "canvas.1: write a text, or {'mask': 8} for a hole of 8 tokens"),
        ({"canvas": [5]}, {}, "canvas.0: write a text, or {'mask': 8} for a hole of 8 tokens (given 5)"),
        ({"canvas": [{"mask": 60}, "a", {"mask": 60}]}, {}, "canvas: its masks are more than the model's context"),
        ({"canvas": [{"mask": 1}] * 2000}, {}, "canvas: write at most 1024 of them"),
        ({"canvas": ["a" * 2**16, "b", {"mask": 1}]}, {}, "canvas: its texts have 65537 characters, at most 65536 may"),
        ({"suffix": "a" * 2**17}, {}, "suffix: "),
        ({"suffix": "a", "max_tokens": 10**9}, {}, "max_tokens: its masks are more than the model's context of 100"),
        ({"canvas": [{"mask": 1}], "max_tokens": 5}, {}, "max_tokens: canvas says how long the answer is"),
        ({"canvas": [{"mask": 1}], "suffix": "a"}, {}, "suffix: canvas says what stands after the answer"),
        ({"suffix": 5}, {}, "suffix: write it as text"),
        ({"suffix": "a", "stop": "b"}, {}, "stop: what stands after an answer says where it ends"),
        ({"suffix": "a", "top_k": 5}, {"temperature": 1.0}, "top_k: an answer with a canvas is drawn from all that"),
        ({"suffix": "a", "top_k": 1}, {"temperature": 1.0}, "top_k: an answer with a canvas is drawn from all that"),
        ({"suffix": "a", "ignore_eos": True}, {}, "ignore_eos: no end token is filled into a hole"),
        (
            {"suffix": "a", "response_format": {"type": "json_object"}}, {},
            "suffix: response_format says what the answer is held to",
        ),
        ({"suffix": "a"}, {"strategy": "d2f"}, "suffix: strategy d2f does not show the model"),
        ({"canvas": [{"mask": 1}]}, {"strategy": "block_diffusion"}, "canvas: strategy block_diffusion does not"),
        ({"suffix": "a"}, {"mask_probability": "counted"}, "a canvas is not kept with mask_probability counted: leave"),
    ],
)  # fmt: skip
def test_what_is_no_canvas_is_refused(given: dict[str, Any], settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as refused:
        made(DECODE.changed(settings), **given)
    assert str(refused.value).startswith(sentence)


def test_an_answer_may_end_after_so_many_tokens() -> None:
    wishes = Wishes.read({"min_tokens": 2})
    _, automaton = any_text(wishes, DECODE, 300, "min_tokens")
    assert automaton.closed([5]).next_QC.tolist() == [[-1, 1, -1], [-1, 2, -1], [-1, 2, 3], [-1, -1, 3]]


def test_what_tokens_are_kept_out_of_is_not_edited() -> None:
    strategy = {"name": "block_diffusion", "edit_threshold": 0.5, "penalty_lambda": 0.5}
    edited = DECODE.changed({"strategy": strategy, "block_add_threshold": 1.0})
    decode, _ = any_text(Wishes.read({"min_tokens": 2}), edited, 300, "min_tokens")
    assert decode.strategy == edited.strategy.model_copy(update={"edit_threshold": None, "penalty_lambda": 0.0})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: the answer has at most 8 tokens: lower it, or raise max_to"),
        ({"min_tokens": -1}, "min_tokens: set it to 0 or more"),
        ({"min_tokens": 2, "top_p": 0.5, "temperature": 1.0}, "top_p: an answer with min_tokens is drawn from all"),
        ({"min_tokens": 2, "mask_probability": "counted"}, "min_tokens is not kept with mask_probability counted: le"),
    ],
)
def test_what_ends_too_soon_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as refused:
        wishes = Wishes.read(given)
        any_text(wishes, wishes.merged(DECODE), 300, "min_tokens")
    assert str(refused.value).startswith(sentence)
