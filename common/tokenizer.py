"""Text to token ids and back, from the files of a checkpoint folder and nothing else: no code of the folder is run.

A folder with tokenizer.json is read as it is. Dream ships vocab.json, merges.txt and a tokenization_dream.py instead;
that class is Qwen2's byte-level BPE, so the same pipeline is written down here in tokenizer.json's terms.

A prompt may contain the mask token's text. Encoding knows every special token but that one, so such text becomes
ordinary tokens and a prompt never contains the mask id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json import dumps
from pathlib import Path
from typing import Any

import tokenizers

from common.config import ConfigError
from common.models.config import read_json_object

# The pattern of Qwen2 and Dream: contractions, words, single digits, punctuation, line breaks, spaces.
_PRETOKENIZE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token")


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
    settings = _read_optional(folder / "tokenizer_config.json")
    roles = _special_tokens(settings, _read_optional(folder / "special_tokens_map.json"))
    spec = _read_spec(folder, settings, roles)
    decoder = _build(folder, spec)
    ids = {role: decoder.token_to_id(token) for role, token in roles.items()}
    if mask_token_id is None:
        own = _read_optional(folder / "config.json").get("mask_token_id")
        mask_token_id = own if isinstance(own, int) and own >= 0 else ids.get("mask_token")
    mask_token = None if mask_token_id is None else decoder.id_to_token(mask_token_id)
    return Tokenizer(
        bos_id=ids.get("bos_token"),
        eos_id=ids.get("eos_token"),
        pad_id=ids.get("pad_token"),
        mask_id=mask_token_id,
        _folder=folder,
        _encoder=_build(folder, _without(spec, mask_token)),
        _decoder=decoder,
        _special_tokens=roles,
        _chat_template=_read_chat_template(folder, settings),
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Role -> token text; a token is written as its text or as an object with `content`. The first source wins."""
    roles: dict[str, str] = {}
    for role in _SPECIAL_ROLES:
        for source in sources:
            token = source.get(role)
            token = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(token, str):
                roles.setdefault(role, token)
    return roles


def _read_spec(folder: Path, settings: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, Any]:
    """The tokenizer in the terms of tokenizer.json, added tokens of the other files included."""
    path = folder / "tokenizer.json"
    spec = read_json_object(path) if path.is_file() else _byte_level_bpe(folder)
    model = spec.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise ConfigError(f"{path}: model.vocab: missing; download the file again")
    try:
        tokens = [*(spec.get("added_tokens") or []), *_added_tokens(folder, settings, roles)]
        first = {token["content"]: token for token in reversed(tokens)}
        spec["added_tokens"] = sorted(first.values(), key=lambda token: int(token["id"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder}: the added tokens are not readable ({error!r}); download its files again"
        ) from None
    if isinstance(model["vocab"], dict):
        # `tokenizers` numbers added tokens by their order unless the vocabulary has them: put their ids there.
        model["vocab"] = model["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    return spec


def _byte_level_bpe(folder: Path) -> dict[str, Any]:
    """Qwen2's and Dream's tokenizer from vocab.json and merges.txt."""
    merges_path = folder / "merges.txt"
    if not merges_path.is_file():
        raise ConfigError(f"{folder}: neither tokenizer.json nor vocab.json with merges.txt found; download them")
    lines = merges_path.read_text(encoding="utf-8").split("\n")
    merges = [line.strip() for line in lines if line.strip() and not line.startswith("#version:")]
    split = {"type": "Split", "pattern": {"Regex": _PRETOKENIZE}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": read_json_object(folder / "vocab.json"),
            "merges": merges,
        },
    }


def _added_tokens(folder: Path, settings: Mapping[str, Any], roles: Mapping[str, str]) -> list[dict[str, Any]]:
    """The tokens of tokenizer_config.json's added_tokens_decoder, or of the older added_tokens.json."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        return [{**flags, "special": False, **token, "id": int(id_)} for id_, token in decoder.items()]
    special = [*roles.values(), *(settings.get("additional_special_tokens") or [])]
    added = _read_optional(folder / "added_tokens.json")
    return [{**flags, "content": text, "special": text in special, "id": id_} for text, id_ in added.items()]


def _without(spec: dict[str, Any], token: str | None) -> dict[str, Any]:
    """The same tokenizer, to which `token` is ordinary text."""
    if token is None:
        return spec
    model, vocab = spec["model"], spec["model"]["vocab"]
    if isinstance(vocab, dict):
        model = model | {"vocab": {text: id_ for text, id_ in vocab.items() if text != token}}
    added = [entry for entry in spec["added_tokens"] if entry["content"] != token]
    return spec | {"model": model, "added_tokens": added}


def _build(folder: Path, spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(dumps(spec))
    except Exception as error:  # `tokenizers` raises plain Exception whatever is wrong
        raise ConfigError(f"{folder}: the tokenizer files are not valid ({error}); download them again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
