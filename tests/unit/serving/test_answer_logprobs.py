"""A token's log probability goes out with its text, in the forms of OpenAI's and SGLang's APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from common.config import DecodeConfig
from common.decoding import TokenLogprob
from common.serving.http.fields import ChatFields, CompletionFields, GenerateFields
from common.serving.http.responses.logprobs import Told, ToldText, of_chat, of_completion, of_rollout
from common.text import AnswerText, Writing
from tests.unit.serving.test_orders import book

END, HALF = 9, 8
TEXTS = {1: "He", 2: "llo", 3: " wor", 4: "ld", 5: "x", END: "<end>"}


class Tokenizer:
    """HALF is half of a character: two of them are one."""

    writing = Writing(special_tokens={END: "<end>"})

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text, ids = "", [id for id in ids if not (skip_special_tokens and id == END)]
        while ids:
            id = ids.pop(0)
            if id == HALF:
                is_whole = ids[:1] == [HALF]
                ids = ids[is_whole:]
            text += ("\N{PILE OF POO}" if is_whole else "\N{REPLACEMENT CHARACTER}") if id == HALF else TEXTS[id]
        return text


def strings(ids: Sequence[int]) -> list[str]:
    return [Tokenizer().decode([id], False) for id in ids]


def told(ids: Sequence[int], *sizes: int, stop: tuple[str, ...] = ()) -> tuple[list[str], list[list[tuple[int, int]]]]:
    """Texts of pieces of so many tokens, and (token, offset) of what goes out with each."""
    text = ToldText(AnswerText(Tokenizer(), DecodeConfig(stop=stop)))
    pieces, begin = [], 0
    for size in (*sizes, len(ids) - sum(sizes)):
        own = list(ids[begin : begin + size])
        add = text.add if begin + size < len(ids) else text.end
        pieces.append(add(own, [TokenLogprob(-float(id)) for id in own]))
        begin += size
    return [one for one, _ in pieces], [[(each.token_id, each.offset) for each in own] for _, own in pieces]


def test_a_token_goes_out_with_its_text() -> None:
    assert told([1, 2, 3], 1, 1) == (["He", "llo", " wor"], [[(1, 0)], [(2, 2)], [(3, 5)]])


def test_a_token_waits_while_its_text_may_begin_a_stop_string() -> None:
    texts, tokens = told([1, 2, 3, 4, 5], 1, 1, 1, 1, stop=("llo worm",))
    assert texts == ["He", "", "", "llo world", "x"]
    assert tokens == [[(1, 0)], [], [], [(2, 2), (3, 5), (4, 9)], [(5, 11)]]


def test_tokens_of_a_stop_string_go_out_at_the_end() -> None:
    assert told([1, 2, 3, 4], 2, 1, stop=("llo w",)) == (["He", "", ""], [[(1, 0)], [], [(2, 2), (3, 2), (4, 2)]])


def test_halves_of_a_character_go_out_together_and_an_end_last() -> None:
    texts, tokens = told([1, HALF, HALF, END], 1, 1, 1)
    assert texts == ["He", "", "\N{PILE OF POO}", ""]
    assert tokens == [[(1, 0)], [], [(HALF, 2), (HALF, 2)], [(END, 3)]]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3,)])
@pytest.mark.parametrize("stop", [(), ("\N{REPLACEMENT CHARACTER} wo!",)])
def test_a_token_after_half_a_character_stands_after_it(sizes: tuple[int, ...], stop: tuple[str, ...]) -> None:
    texts, tokens = told([1, HALF, 3, 4], *sizes, stop=stop)
    assert "".join(texts) == "He\N{REPLACEMENT CHARACTER} world"
    assert [one for piece in tokens for one in piece] == [(1, 0), (HALF, 2), (3, 3), (4, 7)]


ONE = Told(1, TokenLogprob(-0.5, ((2, -0.25), (1, -0.5))), 0)
TWO = Told(HALF, TokenLogprob(-3.0, ((END, -0.1), (1, -2.0))), 2)


def test_a_chat_has_bytes_and_alternatives_of_each_token() -> None:
    first, second = of_chat([ONE, TWO], strings)["content"]
    assert first == {
        "token": "He", "logprob": -0.5, "bytes": [72, 101],
        "top_logprobs": [
            {"token": "llo", "logprob": -0.25, "bytes": [108, 108, 111]},
            {"token": "He", "logprob": -0.5, "bytes": [72, 101]},
        ],
    }  # fmt: skip
    assert second["bytes"] is None and second["top_logprobs"][0]["token"] == "<end>"


def test_a_completion_has_lists_side_by_side() -> None:
    assert of_completion([ONE, TWO], strings) == {
        "tokens": ["He", "\N{REPLACEMENT CHARACTER}"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"llo": -0.25, "He": -0.5}, {"<end>": -0.1, "He": -2.0, "\N{REPLACEMENT CHARACTER}": -3.0}],
        "text_offset": [0, 2],
    }


def test_a_rollout_has_triples() -> None:
    found = of_rollout([ONE], strings)
    assert found["output_token_logprobs"] == [[-0.5, 1, "He"]]
    assert found["output_top_logprobs"] == [[[-0.25, 2, "llo"], [-0.5, 1, "He"]]]


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (CompletionFields, {}, None), (CompletionFields, {"logprobs": False}, None),
        (CompletionFields, {"logprobs": 0}, 0), (CompletionFields, {"logprobs": 5}, 5),
        (ChatFields, {"logprobs": True}, 0), (ChatFields, {"logprobs": True, "top_logprobs": 20}, 20),
        (ChatFields, {"logprobs": False, "top_logprobs": 0}, None),
        (GenerateFields, {"return_logprob": True, "top_logprobs_num": 3}, 3), (GenerateFields, {}, None),
    ],
)  # fmt: skip
def test_each_route_asks_in_its_own_words(kind: Any, fields: dict[str, Any], expected: int | None) -> None:
    prompt = {"messages": [{"role": "user", "content": "a"}]} if kind is ChatFields else {"prompt": "a"}
    made = kind.model_validate({**prompt, **fields})
    (order,) = book().orders("x-", made, [(5, 6)], None).orders
    assert order.request.num_logprobs == expected


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        (CompletionFields, {"logprobs": 2, "echo": True}, "logprobs: with echo they are refused, as a prompt's tokens"),
        (CompletionFields, {"logprobs": True}, "valid integer"), (CompletionFields, {"logprobs": 21}, "less than"),
        (ChatFields, {"top_logprobs": 2}, "top_logprobs: only with logprobs true"),
        (GenerateFields, {"top_logprobs_num": 2}, "top_logprobs_num: only with return_logprob true"),
        (GenerateFields, {"input_ids": [5]}, "prompt: it is given twice"),
        (GenerateFields, {"max_tokens": 5, "sampling_params": {"max_new_tokens": 6}}, "max_tokens: it is given twice"),
        (GenerateFields, {"sampling_params": 5}, "valid dictionary"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(kind: Any, fields: dict[str, Any], sentence: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "a"}]} if kind is ChatFields else {"prompt": "a"}
    with pytest.raises(ValidationError, match=sentence):
        kind.model_validate({**prompt, **fields})


def test_null_in_sampling_params_is_absent() -> None:
    own = {"max_new_tokens": None, "n": None, "stop": None, "regex": None, "ignore_eos": None}
    made = GenerateFields.model_validate({"prompt": "a", "max_tokens": 5, "sampling_params": own})
    assert made.max_tokens == 5 and made.unsupported() is None and made.wishes == made.wishes._replace(max_tokens=5)
    assert made.n == 1 and made.stop == [] and not made.ignore_eos


def test_a_rollout_may_speak_as_to_sglang() -> None:
    sampling = {"max_new_tokens": 7, "temperature": 0.5, "stop_token_ids": [4], "ignore_eos": True, "top_k": -1}
    made = GenerateFields.model_validate({"input_ids": [5, 6], "sampling_params": sampling, "text": None})
    assert made.prompt == [5, 6] and made.is_rollout and not GenerateFields.model_validate({"prompt": "a"}).is_rollout
    assert (made.max_tokens, made.temperature, made.stop_token_ids, made.ignore_eos) == (7, 0.5, [4], True)
