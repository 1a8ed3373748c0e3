"""Stop strings are found in the text of new tokens as they are in the whole text, however the tokens are cut."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.checkpoint import StopFinder, stop_finder

PIECES = ("a", "b", " ", "\n", "ä", "é", "語", "の", "👍", "👩‍👧", "ab", " the", "\n\n", "Q:", "…")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


class ByteLevel:
    """As Dream's: every token is some bytes, so a character may be cut anywhere. Ids from 256 on have no text."""

    def __init__(self) -> None:
        vocabulary = {letter: index for index, letter in enumerate(BYTES)}
        self._tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.decoder = decoders.ByteLevel()

    def encode(self, text: str) -> list[int]:
        return [id for id in self._tokenizer.encode(text).ids for id in ((id, 300) if id % 7 == 0 else (id,))]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


class ByteFallback:
    """As Llama's: characters that have no token are bytes, a run of which is a text or broken as a whole; the space in
    front of a text is taken away."""

    def __init__(self) -> None:
        tokens = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "b", "▁the", "Q", ":", "語"]
        self._id_of = {token: index for index, token in enumerate(tokens)}
        self._tokenizer = Tokenizer(models.BPE(vocab=self._id_of, merges=[], unk_token="<unk>", byte_fallback=True))
        self._tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )

    def encode(self, text: str) -> list[int]:
        known = ((letter, self._id_of.get(letter.replace(" ", "▁"))) for letter in text)
        return [id for letter, own in known for id in ([own] if own else [byte + 1 for byte in letter.encode()])]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


TOKENIZERS = (ByteLevel(), ByteFallback())


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda tokenizer: type(tokenizer).__name__)
def test_step_by_step_a_stop_string_is_found_where_the_whole_text_has_it(tokenizer: ByteLevel | ByteFallback) -> None:
    rng, num_found = random.Random(0), 0
    for _ in range(150):
        ids = tokenizer.encode("".join(rng.choices(PIECES, k=rng.randint(5, 120))))
        for place in rng.sample(range(len(ids)), k=rng.choice((0, 0, 0, 1, 3))):
            ids[place] = rng.randrange(1, 256)  # bytes that are no text, as a model may make them
        text = tokenizer.decode(ids)
        starts = [rng.randrange(len(text)) for _ in range(rng.randint(1, 3))]
        stops = tuple(text[start : start + rng.randint(1, 12)] for start in starts)
        find = StopFinder(stops, tokenizer)
        end = num_searched = 0
        while end < len(ids):
            end = min(len(ids), end + rng.choice((0, 1, 1, 2, 3, 17)))
            found = find(ids[:end], num_searched)
            assert found == find.in_whole(ids[:end]), (ids, stops, num_searched, end)
            if found is not None:
                num_found += 1
                break
            num_searched = end
    assert num_found > 100


def test_a_long_answer_is_not_decoded_at_every_step() -> None:
    tokenizer, decoded = ByteLevel(), []

    class Counting:
        def decode(self, ids: Sequence[int]) -> str:
            decoded.append(len(ids))
            return tokenizer.decode(ids)

    ids = tokenizer.encode("some text that goes on " * 50)
    find = StopFinder(("Q:", "\n\n"), Counting())
    for num_searched in range(200, len(ids)):
        assert find(ids[: num_searched + 1], num_searched) is None
    assert max(decoded) < 60


def test_without_stop_strings_nothing_is_looked_for() -> None:
    assert stop_finder((), TOKENIZERS[0]) is None
    assert stop_finder(["a"], TOKENIZERS[0]) == StopFinder(("a",), TOKENIZERS[0])
