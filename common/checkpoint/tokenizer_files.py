"""A folder's tokenizer files, in the terms of tokenizer.json.

A folder with tokenizer.json is read as it is. Dream ships vocab.json, merges.txt and a tokenization_dream.py instead;
that class is Qwen2's byte-level BPE, so the same pipeline is written down here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from itertools import pairwise
from json import dumps
from math import prod
from pathlib import Path
from typing import Any

import tokenizers

from common.checkpoint.folder import MOST_VOCABULARY_BYTES, has_file, plain, read_json_object, read_text, shown
from common.errors import ConfigError, first_line

# The pattern of Qwen2 and Dream: contractions, words, single digits, punctuation, line breaks, spaces.
_PRETOKENIZE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_MOST_IDS = 2**31
_MOST_STEPS = 64
_MOST_GROWTH = 64
_SPECIAL_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if has_file(path) else {}


def read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; where that has no `added_tokens_decoder`, special_tokens_map.json goes before it."""
    settings = read_optional(folder / "tokenizer_config.json")
    older = {} if "added_tokens_decoder" in settings else read_optional(folder / "special_tokens_map.json")
    return {**settings, **older}


def special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Role -> token text."""
    given = {role: settings[role] for role in _SPECIAL_ROLES if settings.get(role)}
    roles = {role: text for role, token in given.items() if (text := _text_of(token)) is not None}
    for role in given.keys() - roles.keys():
        raise ConfigError(f"{folder}: {role}: expected a text, found {shown(given[role])}; download its files again")
    for role, token in roles.items():
        if any("\ud800" <= letter <= "\udfff" for letter in token):
            raise ConfigError(f"{folder}: {role}: {shown(token)} holds half a surrogate pair; download its files again")
    return roles


def _text_of(token: Any) -> str | None:
    """A token is written as its text or as an object with `content`."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def read_spec(folder: Path, settings: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, Any]:
    """The tokenizer in the terms of tokenizer.json, added tokens of the other files included."""
    path = folder / "tokenizer.json"
    spec = read_json_object(path, MOST_VOCABULARY_BYTES) if has_file(path) else _byte_level_bpe(folder)
    model = spec.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise ConfigError(f"{path}: model.vocab: missing; download the file again")
    try:
        spec["added_tokens"] = _added_tokens(folder, spec, settings, roles)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder}: the added tokens are not readable ({brief(error)}); download its files again"
        ) from None
    _check_growth(path, spec)
    _check_merges(path, model)
    if isinstance(model["vocab"], dict):
        # `tokenizers` numbers added tokens by their order unless the vocabulary has them: put their ids there.
        model["vocab"] = model["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    return spec


def _added_tokens(
    folder: Path, spec: Mapping[str, Any], settings: Mapping[str, Any], roles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return added tokens by id. Ids of tokenizer.json (`spec`) go before those of the other files. Raises ValueError
    where two contradict.

    Special are tokens with a role, and those that tokenizer.json or tokenizer_config.json calls so; where a class
    builds the tokenizer anew from the vocabulary, the latter alone says it.
    """
    tokens = {token["content"]: token for token in reversed(spec.get("added_tokens") or [])}
    vocab = spec["model"]["vocab"] if isinstance(spec["model"]["vocab"], dict) else {}
    is_rebuilt = settings.get("tokenizer_class") not in (None, "PreTrainedTokenizerFast", "TokenizersBackend")
    special, extra = set(roles.values()), _extra_tokens(settings)
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        for id_, token in decoder.items():
            text = token["content"]
            first = tokens.get(text, {"id": vocab.get(text, int(id_))})
            if text in tokens and first["id"] != int(id_):
                raise ValueError(f"{shown(text)} is id {first['id']} and id {int(id_)}")
            is_special = token.get("special", False) or (first.get("special", False) and not is_rebuilt)
            tokens[text] = {**_FLAGS, **token, "id": first["id"], "special": is_special}
    else:
        for text, id_ in read_optional(folder / "added_tokens.json").items():
            tokens.setdefault(text, {**_FLAGS, "content": text, "id": vocab.get(text, id_), "special": text in extra})
    for text in special | extra:
        if text in tokens and (text in special or is_rebuilt):
            tokens[text] = {**tokens[text], "special": True}
        elif text in vocab:
            tokens.setdefault(text, {**_FLAGS, "content": text, "id": vocab[text], "special": True})
    added = sorted(tokens.values(), key=_id_of)
    for token, following in pairwise(added):
        if token["id"] == following["id"]:
            raise ValueError(f"id {token['id']} is {shown(token['content'])} and {shown(following['content'])}")
    return added


def _extra_tokens(settings: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for key in ("extra_special_tokens", "additional_special_tokens"):
        tokens = settings.get(key) or []
        texts = map(_text_of, tokens.values() if isinstance(tokens, Mapping) else tokens)
        found |= {text for text in texts if text is not None}
    return found


def _byte_level_bpe(folder: Path) -> dict[str, Any]:
    """Qwen2's and Dream's tokenizer from vocab.json and merges.txt."""
    merges_path = folder / "merges.txt"
    if not has_file(merges_path):
        raise ConfigError(f"{folder}: neither tokenizer.json nor vocab.json with merges.txt found; download them")
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
            "vocab": read_json_object(folder / "vocab.json", MOST_VOCABULARY_BYTES),
            "merges": _merges(merges_path),
        },
    }


def _merges(path: Path) -> list[str]:
    merges = []
    for number, line in enumerate(read_text(path, MOST_VOCABULARY_BYTES).split("\n"), start=1):
        merge = line.strip()
        if not merge or line.startswith("#version:"):
            continue
        if merge.count(" ") != 1:
            raise ConfigError(f"{path}: line {number}: {shown(merge)} is not two parts and a space; download it again")
        merges.append(merge)
    return merges


def _id_of(token: Mapping[str, Any]) -> int:
    id_ = token["id"]
    if isinstance(id_, bool) or not isinstance(id_, int) or not 0 <= id_ < _MOST_IDS:
        raise ValueError(f"id {shown(id_)} of {shown(token['content'])}")
    return id_


def without(folder: Path, spec: dict[str, Any], token_id: int | None) -> dict[str, Any]:
    """The same tokenizer, to which the token's text is ordinary. ConfigError where all texts are made of that token."""
    if token_id is None:
        return spec
    model, vocab = spec["model"], spec["model"]["vocab"]
    added = [entry for entry in spec["added_tokens"] if entry["id"] != token_id]
    if isinstance(vocab, dict):
        texts = {text for text, id_ in vocab.items() if id_ == token_id}
        named = {entry["content"] for entry in spec["added_tokens"]}
        letters = [text for text in texts - named if len(text) == 1 or _BYTE.fullmatch(text)]
        if letters and model.get("type", "BPE") == "BPE":
            raise ConfigError(
                f"{folder}: mask_token_id {token_id} is {shown(letters[0])}, a letter of texts; set the mask token's id"
            )
        model = model | {"vocab": {text: id_ for text, id_ in vocab.items() if id_ != token_id}}
        if isinstance(model.get("merges"), list):
            model["merges"] = _merges_without(texts, model)
    elif isinstance(vocab, list) and token_id < len(vocab):
        model = model | {"vocab": _pieces_without(vocab, token_id)}
    return spec | {"model": model, "added_tokens": added}


def _merges_without(texts: Set[str], model: Mapping[str, Any]) -> list[Any]:
    """Return the merges that neither make one of these tokens nor go on from it."""
    prefix = model.get("continuing_subword_prefix") or ""
    kept = []
    for merge in model["merges"]:
        first, _, second = merge.partition(" ") if isinstance(merge, str) else (merge[0], "", merge[-1])
        if texts.isdisjoint((first, second, first + second.removeprefix(prefix))):
            kept.append(merge)
    return kept


def _pieces_without(pieces: list[Any], token_id: int) -> list[Any]:
    """Places are ids here. A piece that is there twice counts as the later one, so the token becomes a copy of that."""
    return pieces[:token_id] + [pieces[-1]] * (token_id < len(pieces) - 1) + pieces[token_id + 1 :]


def _check_growth(path: Path, spec: Mapping[str, Any]) -> None:
    """Replacements that follow each other can make gigabytes of a letter. Raises ConfigError."""
    for keys in (("normalizer", "pre_tokenizer"), ("decoder",)):
        steps = [step for key in keys for step in _steps(spec.get(key))]
        if len(steps) > _MOST_STEPS or prod(map(_growth, steps)) > _MOST_GROWTH:
            raise ConfigError(
                f"{path}: {' and '.join(keys)}: more than {_MOST_STEPS} steps, or a text becomes {_MOST_GROWTH} times "
                "longer; download the file again"
            )


def _check_merges(path: Path, model: Mapping[str, Any]) -> None:
    """`tokenizers` cuts the prefix off the second part of every merge; where that cuts a letter in two, the process
    ends. Raises ConfigError."""
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not isinstance(prefix, str) or not prefix or not isinstance(merges, list):
        return
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if isinstance(parts, list) and parts and not str(parts[-1]).startswith(prefix):
            raise ConfigError(
                f"{path}: model.merges: {shown(merge)} does not go on with continuing_subword_prefix {shown(prefix)}; "
                "download the file again"
            )


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(part, Mapping):
        yield part
        for key in ("normalizers", "pretokenizers", "decoders"):
            inner = part.get(key)
            for one in inner if isinstance(inner, list) else ():
                yield from _steps(one)


def _growth(step: Mapping[str, Any]) -> float:
    """How many times longer a text may become."""
    if step.get("type") == "ByteLevel":
        return 2
    content = step.get("content") if step.get("type") == "Replace" else step.get("prepend")
    if not isinstance(content, str):
        return 1
    pattern = step.get("pattern")
    replaced = pattern.get("String") if isinstance(pattern, Mapping) else None
    return max(1, len(content) / len(replaced) if isinstance(replaced, str) and replaced else len(content) + 1)


def build(folder: Path, spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
    with failing(f"{folder}: the tokenizer files are not valid"):
        tokenizer = tokenizers.Tokenizer.from_str(dumps(spec))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def failing(sentence: str) -> Iterator[None]:
    """Raise ConfigError where `tokenizers` fails: it raises plain Exception, or panics with what is none at all."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{sentence} ({brief(error)}); download its files again") from None


def brief(error: BaseException) -> str:
    return plain(first_line(error))


def read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The default template: a file of its own goes before tokenizer_config.json (`settings`). None where none is.
    Raises ConfigError for one that is no text."""
    named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    for path in (folder / "additional_chat_templates" / "default.jinja", folder / "chat_template.jinja"):
        if has_file(path):
            return read_text(path)
    template = None if named else settings.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, Mapping) for entry in template):  # several named ones
        template = next((entry.get("template") for entry in template[::-1] if entry.get("name") == "default"), None)
    elif isinstance(template, Mapping):
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}: chat_template: expected a text, found {shown(template)}; download "
            "the file again"
        )
    return template
