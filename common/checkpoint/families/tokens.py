"""The ids that decoding must know: end, padding and mask tokens, wherever a checkpoint's files name them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.families.fields import FIX, Fields
from common.checkpoint.folder import MOST_VOCABULARY_BYTES, has_file, read_json_object, shown
from common.checkpoint.tokenizer_files import read_settings, special_tokens

_MOST_DIGITS = 20  # of an id


def stop_token_ids(fields: Fields, vocab_size: int, turn_end: str | None) -> tuple[int, ...]:
    """All end tokens of generation_config.json, or of config.json where that names none, and the one that ends a turn.

    turn_end: an added token, where the files have it. Raises ConfigError where config files name no end token.
    """
    source = _source_of(fields, "eos_token_id")
    value = source.get("eos_token_id")
    ids: dict[int, None] = {}
    for one in value if isinstance(value, list) else [value]:
        if one is not None:
            ids[source.token_id("eos_token_id", one, vocab_size)] = None
    if not ids:
        raise fields.error("eos_token_id", "missing here and in generation_config.json; add the id of the end token")
    value = _added_tokens(fields.path.parent).get(turn_end) if turn_end is not None else None
    if value is not None:
        ids[fields.token_id("eos_token_id", value, vocab_size)] = None
    return tuple(ids)


def mask_token_id(fields: Fields, vocab_size: int, stop_ids: tuple[int, ...], text: str | None) -> int | None:
    """The id of a config file, of the added token `text`, or of the tokenizer's mask token; None where no file has one.

    text: None: a config must name the id.
    """
    source = _source_of(fields, "mask_token_id")
    value = source.get("mask_token_id")
    if source is not fields and fields.has("mask_token_id") and fields.get("mask_token_id") not in (None, value):
        other = shown(fields.get("mask_token_id"))
        raise source.error("mask_token_id", f"{shown(value)}, but {fields.path.name} says {other}; correct either")
    if value is None and text is not None:
        value = _mask_of_tokenizer(fields.path.parent, text)
        if value is None:
            return None
    elif source is fields:
        value = fields.integer("mask_token_id", at_least=0)
    mask = fields.token_id("mask_token_id", value, vocab_size)
    if mask in stop_ids:
        raise fields.error("mask_token_id", f"{mask} is the end token too, so that no text could have an end; {FIX}")
    return mask


def _source_of(fields: Fields, key: str) -> Fields:
    """generation_config.json where it names such a token, else config.json."""
    path = fields.path.with_name("generation_config.json")
    generation = Fields(path) if has_file(path) else fields
    return fields if generation.get(key) in (None, []) else generation


def _mask_of_tokenizer(folder: Path, text: str) -> Any:
    """The id under which a tokenizer file lists the family's mask token, or the one that the tokenizer names."""
    id_of = _added_tokens(folder)
    named = special_tokens(folder, read_settings(folder)).get("mask_token")
    return id_of.get(text, id_of.get(named) if named is not None else None)


def _added_tokens(folder: Path) -> dict[str, Any]:
    """Token -> id, by the precedence of `tokenizer_files`; what is not in the form of such a list is passed over."""
    id_of: dict[str, Any] = {}
    decoder = _optional(folder / "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        for id_, token in decoder.items():
            is_id = id_.isdecimal() and len(id_) < _MOST_DIGITS
            if is_id and isinstance(token, Mapping) and isinstance(token.get("content"), str):
                id_of[token["content"]] = int(id_)
    else:
        id_of |= _optional(folder / "added_tokens.json")
    tokens = _optional(folder / "tokenizer.json").get("added_tokens")
    for entry in tokens if isinstance(tokens, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("content"), str):
            id_of[entry["content"]] = entry.get("id")
    return id_of


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path, MOST_VOCABULARY_BYTES) if has_file(path) else {}
