"""How long a text can be for its tokens, so that one which cannot fit is found without tokenising it.

Tokenising 50 MB takes minutes and gigabytes. Whether a bound exists follows from the tokenizer's parts: none of them
may drop or join characters, other than Unicode's composition, which joins four at most.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from common.checkpoint.tokenizer import Tokenizer

_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")
_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Split", "Punctuation")
_MOST_COMPOSED = 4  # the longest canonical decomposition of a character


@dataclass(frozen=True, slots=True)
class CharacterBound:
    """The characters that a token stands for at most, and how many a normalizer joins to one of them."""

    per_token: int
    composed: int

    def of(self, text: str, num_tokens: int) -> int:
        """Return the most characters that `num_tokens` tokens of such a text can be."""
        return num_tokens * self.per_token * (1 if text.isascii() else self.composed)


def character_bound(tokenizer: Tokenizer) -> CharacterBound | None:
    """Return the bound; None where a part of the tokenizer may drop characters, so that no length is too long."""
    spec = json.loads(tokenizer._encoder.to_str())
    normalizers, pre_tokenizers = _parts(spec["normalizer"]), _parts(spec["pre_tokenizer"])
    vocabulary = tokenizer._encoder.get_vocab(with_added_tokens=True)
    keeps_all = (
        spec["truncation"] is None
        and all(part["type"] in _NORMALIZERS for part in normalizers)
        and all(part["type"] in _PRE_TOKENIZERS and part.get("behavior") != "Removed" for part in pre_tokenizers)
        and not any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
        and _takes_every_byte(spec["model"], pre_tokenizers, vocabulary)
    )
    if not keeps_all:
        return None
    # In a vocabulary of bytes a letter is a byte, of which a character has one or more.
    return CharacterBound(max(map(len, vocabulary)), _MOST_COMPOSED if normalizers else 1)


def _takes_every_byte(
    model: Mapping[str, Any], pre_tokenizers: Sequence[Mapping[str, Any]], vocabulary: Mapping[str, int]
) -> bool:
    """Whether no text is dropped or becomes one token for its unknown letters."""
    is_of_bytes = any(part["type"] == "ByteLevel" for part in pre_tokenizers)
    return model["type"] == "BPE" and is_of_bytes and vocabulary.keys() >= set(ByteLevel.alphabet())


def _parts(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner: list[Mapping[str, Any]] = part["normalizers"] if "normalizers" in part else part["pretokenizers"]
    return [atom for one in inner for atom in _parts(one)]
