"""Small tokenizers, one for each way of writing tokens. Some tokens are special, and some ids have no text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.text import Writing, writing_of

SPECIAL = ("<|im_end|>", "</s>", "<|x|>", "\n")
PLAIN = AddedToken("<tool>", lstrip=True, rstrip=True, special=False)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


@dataclass(frozen=True, slots=True)
class Writer:
    """name: of the kind."""

    name: str
    num_ids: int
    writing: Writing
    _tokenizer: Tokenizer

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def id_of(self, token: str) -> int:
        id = self._tokenizer.token_to_id(token)
        assert id is not None
        return id


def writer(name: str, tokens: Sequence[str], decoder: Any, **model: Any) -> Writer:
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], **model))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(text, lstrip=True, rstrip=True) for text in SPECIAL])
    tokenizer.add_tokens([PLAIN])
    added = tokenizer.get_added_tokens_decoder().items()
    special = {id: token.content for id, token in added if token.special}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    writing = writing_of(json.loads(tokenizer.to_str())["decoder"], vocabulary, special)
    return Writer(name, len(vocabulary) + 3, writing, tokenizer)


def byte_level() -> Writer:
    """A tokenizer like Dream's, LLaDA's and Qwen's: a token is some bytes, so a character may be cut anywhere."""
    pieces = ["Ġthe", "ab", "ÃŃ", "èªŀ", "Ġ", "Ċ", "ĊĊ", "ðŁĳ", "ï¿½", "b<|", "im_end"]
    return writer("byte level", [*BYTES, *pieces], decoders.ByteLevel())


def byte_fallback() -> Writer:
    """A tokenizer like Llama's: characters without a token are bytes, a run of which is a text or broken as a whole."""
    tokens = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "b", "▁the", "Q", ":", "語", "▁ab", "<|"]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return writer("byte fallback", tokens, decoders.Sequence(parts), byte_fallback=True, unk_token="<unk>")


def all_writers() -> list[Writer]:
    letters = ["a", "b", "##b", "##ab", "the", ".", "n't", "'", "語", "▁", "▁a", "b</w>", "the</w>", "<|", " "]
    replaced = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Replace("a ", "A")]
    return [
        byte_level(),
        byte_fallback(),
        writer("word piece", letters, decoders.WordPiece(cleanup=True)),
        writer("metaspace", letters, decoders.Metaspace()),
        writer("suffixes", letters, decoders.BPEDecoder()),
        writer("stripped", letters, decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])),
        writer("joined by spaces", letters, None),
        writer("changed as a whole", letters, decoders.Sequence(replaced)),
    ]


def bytes_to_letters() -> dict[int, str]:
    """What byte-level vocabularies write for a byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + place) for place, byte in enumerate(others)}
