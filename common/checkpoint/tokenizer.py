"""Text to token ids and back, from the files of a checkpoint folder and nothing else: no code of the folder is run.

A folder with tokenizer.json is read as it is. Dream ships vocab.json, merges.txt and a tokenization_dream.py instead;
that class is Qwen2's byte-level BPE, so the same pipeline is written down here in tokenizer.json's terms.

A prompt may contain the mask token's text. Encoding knows every special token but that one, so such text becomes
ordinary tokens and a prompt never contains the mask id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from common.checkpoint.tokenizer_files import (
    build,
    read_chat_template,
    read_optional,
    read_spec,
    special_tokens,
    without,
)
from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Ids are None where the folder names no such token."""

    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    mask_id: int | None
    _folder: Path
    _encoder: tokenizers.Tokenizer = field(repr=False)
    _decoder: tokenizers.Tokenizer = field(repr=False)
    _special_tokens: Mapping[str, str]
    _chat_template: str | None = field(repr=False)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Token ids of a prompt; special tokens written in it count as such, except the mask token (plain text)."""
        if add_bos and self.bos_id is None:
            raise ConfigError(f"{self._folder}: tokenizer_config.json names no bos_token: set add_bos_token to false")
        try:
            ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise ConfigError("the prompt is not valid text (half a surrogate pair?): repair the input line") from None
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids that only the model's padded vocabulary has are left out: they have no text."""
        text: str = self._decoder.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the assistant's answer begins, by the folder's own chat template."""
        if self._chat_template is None:
            raise ConfigError(
                f"{self._folder}: no chat_template in tokenizer_config.json and no chat_template.jinja: send `prompt` "
                "instead of `messages`, or use an instruction-tuned checkpoint"
            )
        return self.encode(self._render(self._chat_template, messages))

    def _render(self, template: str, messages: Sequence[Mapping[str, str]]) -> str:
        # Imported here: it takes seconds, and only chat needs it. It renders the template in jinja's sandbox.
        import transformers
        from jinja2 import TemplateError

        fast_tokenizer: Any = transformers.PreTrainedTokenizerFast
        no_vocabulary = tokenizers.Tokenizer(tokenizers.models.BPE())
        renderer = fast_tokenizer(tokenizer_object=no_vocabulary, **self._special_tokens)
        try:
            text: str = renderer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self._folder}: the chat template rejects the messages ({error}); "
                "send a list of {role, content} that begins with the system or user"
            ) from None
        return text


def load_tokenizer(folder: str | Path, mask_token_id: int | None = None) -> Tokenizer:
    """Read the tokenizer files of `folder`. `mask_token_id`: other than the checkpoint's. Raises ConfigError."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; download the checkpoint and set `model` to its folder")
    settings = read_optional(folder / "tokenizer_config.json")
    roles = special_tokens(settings, read_optional(folder / "special_tokens_map.json"))
    spec = read_spec(folder, settings, roles)
    decoder = build(folder, spec)
    ids = {role: decoder.token_to_id(token) for role, token in roles.items()}
    if mask_token_id is None:
        own = read_optional(folder / "config.json").get("mask_token_id")
        mask_token_id = own if isinstance(own, int) and own >= 0 else ids.get("mask_token")
    mask_token = None if mask_token_id is None else decoder.id_to_token(mask_token_id)
    return Tokenizer(
        bos_id=ids.get("bos_token"),
        eos_id=ids.get("eos_token"),
        pad_id=ids.get("pad_token"),
        mask_id=mask_token_id,
        _folder=folder,
        _encoder=build(folder, without(spec, mask_token)),
        _decoder=decoder,
        _special_tokens=roles,
        _chat_template=read_chat_template(folder, settings),
    )
