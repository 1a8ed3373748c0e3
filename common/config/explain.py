"""Say in one sentence why a setting is refused: the file, the key, what is wrong with it, what to write instead."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from reprlib import Repr
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from common.config.strategies import STRATEGIES, Strategy, keys_of_strategy, why_no_key
from common.errors import did_you_mean

REFUSED_KEYS = {
    "branching_factor": "published scripts use it for both k and k+1; set decode.num_lookahead to k, the number of "
    "lookahead branches beside the anchor",
    "branch_budget": "set pace to balanced where it was auto, and remove it elsewhere",
    "trust_remote_code": "code from a checkpoint folder is never run; remove the key",
}
_STRATEGY = "strategy"  # the key whose section is of one of several kinds
_MAX_GIVEN = 200  # characters of a value that is repeated in a sentence


class _Written(Repr):
    def repr_int(self, number: int, level: int) -> str:
        try:
            return super().repr_int(number, level)
        except ValueError:  # Python writes no decimal that long
            return "a number of thousands of digits"


_written = _Written()
_written.maxstring = _written.maxother = _written.maxlong = 2 * _MAX_GIVEN
_written.maxlist = _written.maxdict = _written.maxtuple = _MAX_GIVEN
_written.maxlevel = 8
# What to do, where pydantic says what is wrong.
_FIXES = {
    "greater_than_equal": "set it to {ge} or more",
    "greater_than": "set it to more than {gt}",
    "less_than_equal": "set it to {le} or less",
    "less_than": "set it to less than {lt}",
    "literal_error": "set it to {expected}",
    "missing": "this key is missing: add it",
    "int_parsing": "set it to a whole number",
    "int_type": "set it to a whole number",
    "int_from_float": "set it to a whole number",
    "finite_number": "set it to a finite number",
    "string_too_short": "write at least {min_length} character",
    "string_too_long": "write at most {max_length} characters",
    "float_parsing": "set it to a number",
    "float_type": "set it to a number",
    "bool_parsing": "set it to true or false",
    "bool_type": "set it to true or false",
    "string_type": "write it as text, in quotes if need be",
    "string_unicode": "write it without half a surrogate pair",
    "tuple_type": "write it as a list",
    "list_type": "write it as a list",
    "too_short": "write at least {min_length} of them",
    "too_long": "write at most {max_length} of them",
    "dict_type": "write it as keys with their values",
    "model_type": "write it as a section of settings: keys with their values",
    "model_attributes_type": "write it as an object: keys with their values",
    "invalid_key": "write the key as text, in quotes if need be",
    "json_invalid": "not valid JSON ({error})",
}


def problem(error: ValidationError, kind: type[BaseModel], section: str = "") -> str:
    """Say the key of the error to begin with, and what to do. section: the key under which the settings stand."""
    first = error_to_begin_with(error)
    where = ".".join([section] * bool(section) + keys_of(first["loc"]))
    return f"{where + ': ' if where else ''}{remedy(first, first['loc'], kind)}"


def error_to_begin_with(error: ValidationError) -> Mapping[str, Any]:
    """The first of the errors; where a key is missing an unknown one, which may be the same, misspelt."""
    errors = error.errors()
    unknown = [one for one in errors if one["type"] == "extra_forbidden"]
    return unknown[0] if unknown and errors[0]["type"] == "missing" else errors[0]


def remedy(error: Mapping[str, Any], location: Sequence[int | str], kind: type[BaseModel]) -> str:
    """Say what to do about one of pydantic's errors, and what was given. location: of the error within `kind`."""
    if error["type"] == "extra_forbidden":
        if len(location) > 2 and location[-3] == _STRATEGY:
            return why_no_key(str(location[-1]), str(location[-2]))
        return REFUSED_KEYS.get(str(location[-1])) or f"unknown key; {_suggest(location, kind)}"
    fix = _FIXES.get(error["type"])
    message = fix.format(**error.get("ctx", {})) if fix else error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error":
        message = did_you_mean(str(error["input"]), re.findall("'([^']+)'", error["ctx"]["expected"])) + message
    is_whole = isinstance(error["input"], (dict, bytes, BaseModel))  # bytes: the file itself
    return message if is_whole or "(given " in message else f"{message} (given {given_value(error['input'])})"


def wants_text(kind: type[BaseModel], keys: Sequence[str]) -> bool:
    """Whether this key of these settings is a text."""
    section: type[BaseModel] | None = kind
    for key in keys[:-1]:
        field = section.model_fields.get(key) if section is not None else None
        section = _section(field.annotation) if field is not None else None
    field = section.model_fields.get(keys[-1]) if section is not None else None
    if field is None:
        return False
    annotation = field.annotation
    return annotation is str or (get_origin(annotation) in (Union, UnionType) and str in get_args(annotation))


def given_value(value: object) -> str:
    """A value as Python writes it, cut: however long, wide or deep it is, little of it is looked at."""
    text = _written.repr(value)
    return text if len(text) <= _MAX_GIVEN else f"{text[:_MAX_GIVEN]} ..."


def keys_of(location: Sequence[int | str]) -> list[str]:
    """The YAML keys of a location, without the branches of unions that pydantic puts between them."""
    return [
        str(part)
        for part, before in zip(location, (None, *location), strict=False)
        if not re.match(r"literal\[|\w+Config$", str(part)) and not (before == _STRATEGY and part in STRATEGIES)
    ]


def _suggest(location: Sequence[int | str], kind: type[BaseModel]) -> str:
    parts = ".".join(keys_of(location)).split(".")
    if "." in str(location[-1]) and ".".join(parts) in _all_keys(kind):
        return f"in a file it stands in its section: {': {'.join(parts)}: ...{'}' * (len(parts) - 1)}"
    homes = _homes_of(str(location[-1]), kind)
    if homes:
        return f"write it as {homes[0]}"
    names = _all_keys(kind)
    close = get_close_matches(str(location[-1]), [name.rsplit(".", 1)[-1] for name in names], n=1)
    if close:
        return f"did you mean {next(name for name in names if name.rsplit('.', 1)[-1] == close[0])}?"
    section, place = kind, ""
    for part in location[:-1]:
        field = section.model_fields.get(str(part))
        inner = _section(field.annotation) if field else None
        section, place = (inner, f" of {part}") if inner else (section, place)
    return f"known keys{place}: {', '.join(section.model_fields)}"


def _homes_of(name: str, kind: type[BaseModel]) -> list[str]:
    return [key for key in _all_keys(kind) if key.rsplit(".", 1)[-1] == name]


def _all_keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in kind.model_fields.items():
        section = _section(field.annotation)
        keys += [prefix + name, *(_all_keys(section, f"{prefix}{name}.") if section else [])]
        if name == _STRATEGY:
            keys += [f"{prefix}{name}.{key}" for strategy in STRATEGIES for key in keys_of_strategy(strategy)]
    return keys


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return None if issubclass(annotation, Strategy) else annotation
    for part in getattr(annotation, "__args__", ()):
        found = _section(part)
        if found is not None:
            return found
    return None
