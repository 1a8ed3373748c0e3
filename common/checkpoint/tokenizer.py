"""Text to token ids and back, from the files of a checkpoint folder and nothing else: no code of the folder is run.
Its chat template is rendered in a process of its own (`chat`).

A prompt may contain the mask token's text. Encoding knows every special token but that one, so such text becomes
ordinary tokens and a prompt never contains the mask id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from common.checkpoint.chat import ChatRenderer
from common.checkpoint.folder import existing_folder
from common.checkpoint.tokenizer_files import (
    build,
    failing,
    read_chat_template,
    read_optional,
    read_settings,
    read_spec,
    special_tokens,
    without,
)
from common.errors import ConfigError
from common.text import Writing, writing_of


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer. Ids are None where the folder names no such token."""

    bos_id: int | None
    eos_id: int | None
    mask_id: int | None
    writing: Writing = field(repr=False)
    _folder: Path
    _encoder: tokenizers.Tokenizer = field(repr=False)
    _decoder: tokenizers.Tokenizer = field(repr=False)
    _renderer: ChatRenderer = field(repr=False)
    _chat_template: str | None = field(repr=False)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, add_bos: bool = False, *, beside_others: bool = False) -> list[int]:
        """Token ids of a prompt; special tokens written in it count as such, except the mask token (plain text).

        beside_others: other threads run meanwhile, which costs a short text more than it takes.
        """
        if add_bos and self.bos_id is None:
            raise ConfigError(f"{self._folder}: tokenizer_config.json names no bos_token: set add_bos_token to false")
        try:
            with failing(f"{self._folder}: the tokenizer fails on the prompt"):
                if beside_others:
                    (encoding,) = self._encoder.encode_batch_fast([text], add_special_tokens=False)
                else:
                    encoding = self._encoder.encode(text, add_special_tokens=False)
                ids: list[int] = encoding.ids
        except TypeError:
            raise ConfigError("not valid text (half a surrogate pair?): correct it") from None
        if add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if self.mask_id in ids:
            raise ConfigError(f"{self._folder}: the prompt holds the mask token {self.mask_id}; leave it out")
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids that only the model's padded vocabulary has are left out: they have no text."""
        with failing(f"{self._folder}: the tokenizer fails on the answer"):
            text: str = self._decoder.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self) -> dict[int, bytes]:
        """Return the bytes that each token of a text stands for, by id; special and other added tokens have none.
        Takes about a second. Raises ConfigError for a tokenizer whose tokens do not stand for bytes."""
        found = bytes_of_tokens(self._decoder)
        if found is None:
            raise ConfigError(
                f"{self._folder}: formats need a tokenizer of bytes (ByteLevel), which this one is not: leave them out"
            )
        return found

    @property
    def marks_reasoning(self) -> bool:
        """Whether the chat template knows of reasoning, which ends with </think>."""
        return self._chat_template is not None and "</think>" in self._chat_template

    def chat_text(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """Return a conversation as text up to where the assistant's answer begins, by the folder's own chat template.

        variables: what else the template may read.
        """
        if self._chat_template is None:
            raise ConfigError(
                f"{self._folder}: no default chat_template in tokenizer_config.json and no chat_template.jinja: send "
                "`prompt` instead of `messages`, or use an instruction-tuned checkpoint"
            )
        return self._renderer.render(self._chat_template, messages, variables)


def load_tokenizer(folder: str | Path, mask_token_id: int | None = None) -> Tokenizer:
    """Read the tokenizer files of `folder`. `mask_token_id`: other than the checkpoint's. Raises ConfigError."""
    folder = existing_folder(folder)
    settings = read_settings(folder)
    roles = special_tokens(folder, settings)
    spec = read_spec(folder, settings, roles)
    decoder = build(folder, spec)
    ids = {role: decoder.token_to_id(token) for role, token in roles.items()}
    if mask_token_id is None:
        own = read_optional(folder / "config.json").get("mask_token_id")
        is_id = isinstance(own, int) and not isinstance(own, bool) and own >= 0
        mask_token_id = own if is_id else ids.get("mask_token")
    return Tokenizer(
        bos_id=ids.get("bos_token"),
        eos_id=ids.get("eos_token"),
        mask_id=mask_token_id,
        writing=writing_of(spec.get("decoder"), decoder.get_vocab(with_added_tokens=True), _special_texts(decoder)),
        _folder=folder,
        _encoder=build(folder, without(folder, spec, mask_token_id)),
        _decoder=decoder,
        _renderer=ChatRenderer(folder, roles),
        _chat_template=read_chat_template(folder, settings),
    )


def _special_texts(decoder: tokenizers.Tokenizer) -> dict[int, str]:
    """Return texts by id."""
    added = decoder.get_added_tokens_decoder().items()
    return {id: token.content for id, token in added if token.special}


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
