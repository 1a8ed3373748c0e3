"""A folder's tokenizer files, in the terms of tokenizer.json.

A folder with tokenizer.json is read as it is. Dream ships vocab.json, merges.txt and a tokenization_dream.py instead;
that class is Qwen2's byte-level BPE, so the same pipeline is written down here.
"""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import Any

import tokenizers

from common.checkpoint.json_file import read_json_object
from common.errors import ConfigError

# The pattern of Qwen2 and Dream: contractions, words, single digits, punctuation, line breaks, spaces.
_PRETOKENIZE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token")


def read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Role -> token text; a token is written as its text or as an object with `content`. The first source wins."""
    roles: dict[str, str] = {}
    for role in _SPECIAL_ROLES:
        for source in sources:
            token = source.get(role)
            token = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(token, str):
                roles.setdefault(role, token)
    return roles


def read_spec(folder: Path, settings: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, Any]:
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
    added = read_optional(folder / "added_tokens.json")
    return [{**flags, "content": text, "special": text in special, "id": id_} for text, id_ in added.items()]


def without(spec: dict[str, Any], token: str | None) -> dict[str, Any]:
    """The same tokenizer, to which `token` is ordinary text."""
    if token is None:
        return spec
    model, vocab = spec["model"], spec["model"]["vocab"]
    if isinstance(vocab, dict):
        model = model | {"vocab": {text: id_ for text, id_ in vocab.items() if text != token}}
    added = [entry for entry in spec["added_tokens"] if entry["content"] != token]
    return spec | {"model": model, "added_tokens": added}


def build(folder: Path, spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(dumps(spec))
    except Exception as error:  # `tokenizers` raises plain Exception whatever is wrong
        raise ConfigError(f"{folder}: the tokenizer files are not valid ({error}); download them again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
