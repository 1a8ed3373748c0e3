"""An answer's text is one, however its tokens come: in pieces, as a whole, while it is decoded, or cut afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from writers import SPECIAL, Writer, all_writers, byte_fallback, byte_level, bytes_to_letters

from common.config import DecodeConfig
from common.text import AnswerText, answer_text, stop_finder
from common.text.growing import GrowingText

WRITERS = all_writers()
BYTE_LEVEL = byte_level()
BYTE_LEVEL_LETTERS = bytes_to_letters()


class Drawn(NamedTuple):
    writer: Writer
    ids: list[int]
    decode: DecodeConfig
    sizes: list[int]


@st.composite
def answers(draw: st.DrawFn) -> Drawn:
    """Random tokens of a random tokenizer, stop strings that mostly lie in their text, and sizes of pieces."""
    writer = draw(st.sampled_from(WRITERS))
    ids = draw(st.lists(st.integers(0, writer.num_ids - 1), max_size=40))
    some = [writer.id_of(token) for token in SPECIAL] + ids[:2]
    if ids and draw(st.booleans()):
        ids = [draw(st.sampled_from(some)) if draw(st.booleans()) else id for id in ids]
    skips = draw(st.booleans())
    text, stops = writer.decode(ids, skips), draw(st.lists(st.sampled_from(SPECIAL), max_size=1))
    for _ in range(draw(st.integers(0, 3))):
        if text:
            begin = draw(st.integers(0, len(text) - 1))
            stops.append(text[begin : begin + draw(st.integers(1, 9))])
    token_ids = draw(st.lists(st.sampled_from(ids), max_size=1)) if ids and draw(st.integers(0, 3)) == 0 else []
    decode = DecodeConfig(stop=tuple(stops), stop_token_ids=tuple(token_ids), skip_special_tokens=skips)
    return Drawn(writer, ids, decode, draw(st.lists(st.integers(0, 9), max_size=30)))


def in_pieces(drawn: Drawn, ids: list[int], **given: Any) -> tuple[str, AnswerText]:
    """The text of the pieces together; each piece is a beginning of what the whole would be."""
    answer = AnswerText(drawn.writer, drawn.decode, **given)
    text, place = "", 0
    for size in drawn.sizes:
        text += answer.add(ids[place : place + size])
        place += size
    return text + answer.end(ids[place:]), answer


def cut(drawn: Drawn) -> tuple[str, bool]:
    """What is right, found the plain way in all of the text, and whether something stops it."""
    writer, ids, decode = drawn.writer, drawn.ids, drawn.decode
    special = writer.writing.special_tokens
    named = {id for id, text in special.items() if text in decode.stop and decode.skip_special_tokens}
    ends = [place for place, id in enumerate(ids) if id in named or id in decode.stop_token_ids]
    text = writer.decode(ids[: ends[0]] if ends else ids, decode.skip_special_tokens)
    begins = [text.find(stop) for stop in decode.stop if stop in text]
    return (text[: min(begins)] if begins else text), bool(begins or ends)


@settings(deadline=None, max_examples=400)
@given(answers())
def test_pieces_and_the_whole_are_the_text_in_front_of_the_first_stop(drawn: Drawn) -> None:
    has_mixed = any(text in stop and text != stop for stop in drawn.decode.stop for text in SPECIAL)
    (text, answer), whole = in_pieces(drawn, drawn.ids), answer_text(drawn.writer, drawn.ids, drawn.decode)
    assert text == whole
    if not (drawn.decode.skip_special_tokens and has_mixed):  # those that hold a special token beside other text
        assert (text, answer.stopped_by is not None) == cut(drawn)


@settings(deadline=None, max_examples=400)
@given(answers())
def test_the_engine_stops_where_the_text_does(drawn: Drawn) -> None:
    writer, ids, decode = drawn.writer, drawn.ids, drawn.decode.model_copy(update={"stop_token_ids": ()})
    begin = stop_finder(decode, writer)
    if begin is None:
        assert not decode.stop
        return
    search, place, found = begin(), 0, None
    for size in [*drawn.sizes, len(ids)]:
        place = min(len(ids), place + size)
        found = search.find(ids[search.num_seen : place], is_over=place == len(ids))
        if found is not None:
            break
    kept = len(ids) if found is None else found
    text, answer = in_pieces(drawn._replace(decode=decode), ids[:kept])
    assert (answer.stopped_by is not None) == (found is not None)
    assert text == answer_text(writer, ids, decode)
    fewer = AnswerText(writer, decode)
    fewer.add(ids[: max(0, kept - 1)])
    assert fewer.stopped_by is None  # the last token was needed


@settings(deadline=None, max_examples=300)
@given(answers())
def test_growing_text_is_the_tokenizers(drawn: Drawn) -> None:
    growing, text, place = GrowingText(drawn.writer, drawn.decode.skip_special_tokens), "", 0
    for size in [*drawn.sizes, len(drawn.ids)]:
        text += growing.add(drawn.ids[place : place + size])
        place += size
        assert drawn.writer.decode(drawn.ids, drawn.decode.skip_special_tokens).startswith(text)
    assert text + growing.rest() == drawn.writer.decode(drawn.ids, drawn.decode.skip_special_tokens)


def ids_of(text: str) -> list[int]:
    """Token ids byte by byte, special tokens as such."""
    for token in SPECIAL[:3]:
        if token in text:
            before, _, after = text.partition(token)
            return [*ids_of(before), BYTE_LEVEL.id_of(token), *ids_of(after)]
    return [BYTE_LEVEL.id_of(BYTE_LEVEL_LETTERS[byte]) for byte in text.encode()]


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize(
    ("answer", "stops", "text", "stopped_by"),
    [
        ("one<|im_end|>two", ["<|im_end|>"], "one", "<|im_end|>"),
        ("<|im_end|>two", ["<|im_end|>"], "", "<|im_end|>"),
        ("one<|im_end|>two", ["two", "<|im_end|>"], "one", "<|im_end|>"),
        ("one<|im_end|>two", ["<|im_end|>t"], "one", "<|im_end|>t"),
        ("one<|im_end|></s>two", ["e<|im_end|></s>tw"], "on", "e<|im_end|></s>tw"),
        ("one<|im_end|>tree</s>two", ["<|im_end|>tw", "</s>tw"], None, "</s>tw"),
        ("one two", [" two"], "one", " two"),
        ("one two", ["one"], "", "one"),
        ("one two", ["two", "ne"], "o", "ne"),
        ("one two", ["e", "one tw"], "", "one tw"),
        ("one two", ["e", "one twx"], "on", "e"),
        ("one two", ["on", "one"], "", "on"),
        ("one two", ["three"], "one two", None),
        ("", ["three"], "", None),
        ("a語b👍c", ["👍"], "a語b", "👍"),
        ("a語b👍c", ["語"], "a", "語"),
        ("aaab", ["aab"], "a", "aab"),
    ],
)  # fmt: skip
def test_the_first_stop_ends_the_answer(
    answer: str, stops: list[str], text: str | None, stopped_by: str | None, skips: bool
) -> None:
    decode, ids = DecodeConfig(stop=tuple(stops), skip_special_tokens=skips), ids_of(answer)
    expected = text if text is not None else BYTE_LEVEL.decode(ids_of(answer.partition("</s>")[0]), skips)
    for sizes in ([], [1] * len(ids), [3] * len(ids)):
        drawn = Drawn(BYTE_LEVEL, ids, decode, sizes)
        assert (found := in_pieces(drawn, ids))[0] == expected and found[1].stopped_by == stopped_by
        with_stop, _ = in_pieces(drawn, ids, includes_stop=True)
        assert with_stop == expected + (stopped_by or "")


def test_of_a_special_token_only_what_is_shown_is_searched() -> None:
    ids = ids_of("one<|im_end|>two")
    assert answer_text(BYTE_LEVEL, ids, DecodeConfig(stop=("im_end",))) == "onetwo"
    assert answer_text(BYTE_LEVEL, ids, DecodeConfig(stop=("etwo",))) == "on"
    assert answer_text(BYTE_LEVEL, ids, DecodeConfig(stop=("im_end",), skip_special_tokens=False)) == "one<|"


@pytest.mark.parametrize("skips", [True, False])
def test_a_stop_token_is_not_shown_unless_that_is_asked_for(skips: bool) -> None:
    ids, letter = ids_of("one</s>two"), BYTE_LEVEL.id_of("w")
    for token, text, shown in ((BYTE_LEVEL.id_of("</s>"), "one", "one" if skips else "one</s>"), (letter, None, None)):
        decode = DecodeConfig(stop_token_ids=(token,), skip_special_tokens=skips)
        answer = AnswerText(BYTE_LEVEL, decode)
        before = BYTE_LEVEL.decode(ids[: ids.index(token)], skips)
        assert answer.end(ids) == (text or before) and answer.stopped_by == token
        with_token = AnswerText(BYTE_LEVEL, decode, includes_stop=True).end(ids)
        assert with_token == (shown if text else before + "w")


def test_what_may_begin_a_stop_string_waits_and_nothing_else() -> None:
    answer = AnswerText(BYTE_LEVEL, DecodeConfig(stop=("xyz",)))
    pieces = [answer.add(ids_of(text)) for text in ("abx", "y", "bx", "yz", "more")]
    assert pieces == ["ab", "", "xyb", "", ""] and answer.end() == "" and answer.stopped_by == "xyz"


def test_half_a_character_waits_for_the_other_and_what_stands_before_it_does_not() -> None:
    answer, (first, second) = AnswerText(BYTE_LEVEL, DecodeConfig()), ids_of("é")
    assert answer.add([*ids_of("ab"), first]) == "ab" and answer.add([second]) == "é"
    assert answer.add([first]) == "" and answer.end() == "\N{REPLACEMENT CHARACTER}"


def test_bytes_wait_until_their_run_is_over() -> None:
    """A byte that makes no character breaks those in front of it, too."""
    llama = byte_fallback()
    run = [llama.id_of(f"<0x{byte:02X}>") for byte in "é".encode()]
    answer = AnswerText(llama, DecodeConfig(stop=("é",)))
    assert answer.add([llama.id_of("a"), *run]) == "a" and answer.add([llama.id_of("<0xFF>")]) == ""
    assert answer.add([llama.id_of("b")]) == "\N{REPLACEMENT CHARACTER}" * 3 + "b"
    assert answer.add([*run, llama.id_of("b")]) == "" and answer.stopped_by == "é"


def test_a_long_answer_is_not_decoded_at_every_step() -> None:
    decoded: list[int] = []

    class Counting:
        writing = BYTE_LEVEL.writing

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            decoded.append(len(ids))
            return BYTE_LEVEL.decode(ids, skip_special_tokens)

    begin = stop_finder(DecodeConfig(stop=("Q:", "\n\n")), Counting())
    assert begin is not None and stop_finder(DecodeConfig(), Counting()) is None
    search = begin()
    for id in ids_of("some text that goes on " * 50):
        assert search.find([id], False) is None
    assert max(decoded) < 10
