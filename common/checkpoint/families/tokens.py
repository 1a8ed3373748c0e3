"""The ids that decoding must know: end, padding and mask tokens, wherever a checkpoint's files name them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.families.fields import FIX, Fields
from common.checkpoint.folder import MOST_VOCABULARY_BYTES, is_file
from common.checkpoint.json_file import read_json_object

_MOST_DIGITS = 20  # of an id


def stop_token_ids(fields: Fields, vocab_size: int, turn_end: str | None) -> tuple[int, ...]:
    """All end tokens of config.json, then those of generation_config.json, then the one that ends a turn.

    turn_end: an added token, where the files have it. Raises ConfigError where config files name no end token.
    """
    generation_path = fields.path.with_name("generation_config.json")
    ids: dict[int, None] = {}
    for source in (fields, *([Fields(generation_path)] if is_file(generation_path) else [])):
        value = source.get("eos_token_id")
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                ids[source.token_id("eos_token_id", one, vocab_size)] = None
    if not ids:
        raise fields.error("eos_token_id", "missing here and in generation_config.json; add the id of the end token")
    value = _added_tokens(fields.path.parent).get(turn_end) if turn_end is not None else None
    if value is not None:
        ids[fields.token_id("eos_token_id", value, vocab_size)] = None
    return tuple(ids)


def pad_token_id(fields: Fields, vocab_size: int, eos_token_id: int) -> int:
    value = fields.get("pad_token_id")
    return eos_token_id if value is None else fields.token_id("pad_token_id", value, vocab_size)


def mask_token_id(fields: Fields, vocab_size: int, stop_ids: tuple[int, ...], text: str | None) -> int | None:
    """The config's, or the id of the added token `text` or of the tokenizer's mask token; None where no file has one.

    text: None: the config must name the id.
    """
    if text is not None and fields.get("mask_token_id") is None:
        value = _mask_of_tokenizer(fields.path.parent, text)
        if value is None:
            return None
    else:
        value = fields.integer("mask_token_id", at_least=0)
    mask = fields.token_id("mask_token_id", value, vocab_size)
    if mask in stop_ids:
        raise fields.error("mask_token_id", f"{mask} is the end token too, so that no text could have an end; {FIX}")
    return mask


def _mask_of_tokenizer(folder: Path, text: str) -> Any:
    """The id under which a tokenizer file lists the family's mask token, or the one that the tokenizer names."""
    id_of = _added_tokens(folder)
    named = _optional(folder / "tokenizer_config.json").get("mask_token")
    named = named.get("content") if isinstance(named, Mapping) else named
    return id_of.get(text, id_of.get(named) if isinstance(named, str) else None)


def _added_tokens(folder: Path) -> dict[str, Any]:
    """Token -> id; what is not in the form of such a list is passed over."""
    id_of: dict[str, Any] = {}
    decoder = _optional(folder / "tokenizer_config.json").get("added_tokens_decoder")
    entries = [
        {**token, "id": int(id_)}
        for id_, token in (decoder.items() if isinstance(decoder, Mapping) else ())
        if isinstance(token, Mapping) and id_.isdecimal() and len(id_) < _MOST_DIGITS
    ]
    tokens = _optional(folder / "tokenizer.json").get("added_tokens")
    for entry in [*(tokens if isinstance(tokens, list) else ()), *entries]:
        if isinstance(entry, Mapping) and isinstance(entry.get("content"), str):
            id_of[entry["content"]] = entry.get("id")
    return {**id_of, **_optional(folder / "added_tokens.json")}


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path, MOST_VOCABULARY_BYTES) if is_file(path) else {}
