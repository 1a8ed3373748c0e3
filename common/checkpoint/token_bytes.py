"""What the tokens of a byte-level BPE stand for."""

from __future__ import annotations

import json

import tokenizers


def bytes_of_tokens(tokenizer: tokenizers.Tokenizer) -> dict[int, bytes] | None:
    """Return the bytes of each token, by id, without added tokens; None if the decoder is not ByteLevel alone."""
    if (json.loads(tokenizer.to_str())["decoder"] or {}).get("type") != "ByteLevel":
        return None
    byte_of, added = _bytes_of_letters(), set(tokenizer.get_added_tokens_decoder())
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    return {
        id: bytes(byte_of[letter] for letter in token)
        for token, id in vocabulary.items()
        if id not in added and all(letter in byte_of for letter in token)
    }


def _bytes_of_letters() -> dict[str, int]:
    """Return GPT-2's letters of bytes: printable ones stand for themselves, the others for letters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
