"""Text that comes in pieces is the text of the whole, never cut within a character or a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from common.decoding import without_stop
from common.serving.http.responses.text import TextStream

SPECIAL = 256


def decode(ids: Sequence[int]) -> str:
    """A token is a byte; one is special and has no text."""
    return bytes(token for token in ids if token != SPECIAL).decode(errors="replace")


texts = st.text(alphabet="abé€😀", max_size=12)


@given(texts, st.lists(st.integers(1, 5), max_size=30), st.lists(st.text("abé", min_size=1, max_size=3), max_size=2))
def test_pieces_are_the_whole_without_the_stop_string(text: str, sizes: list[int], stops: list[str]) -> None:
    ids = [*text.encode(), SPECIAL]
    end = next((n for n in range(len(ids) + 1) if any(stop in decode(ids[:n]) for stop in stops)), len(ids))
    stream, given_out, place = TextStream(decode, stops), "", 0
    for size in sizes:
        if place + size >= end:
            break
        given_out += stream.add(ids[place : place + size])
        place += size
        assert without_stop(decode(ids[:end]), stops).startswith(given_out)
    given_out += stream.end(ids[place:end])
    assert given_out == without_stop(decode(ids[:end]), stops)


def test_half_a_character_waits_for_the_other() -> None:
    stream, (first, second) = TextStream(decode, ()), "é".encode()
    assert stream.add([97, first]) == "" and stream.add([second]) == "aé"


def test_what_may_begin_a_stop_string_waits() -> None:
    stream = TextStream(decode, ["xyz"])
    assert stream.add(b"abx") == "a" and stream.add(b"yb") == "bx"
    assert stream.end(b"") == "yb"
