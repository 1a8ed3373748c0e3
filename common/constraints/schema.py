"""Make a JSON Schema the regular expression of the texts it accepts. Every keyword is either enforced or refused
by its name: none is passed over.

Texts have the properties in the schema's order and no others, any white space between tokens, and no \\u escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from common.constraints.lift import SIMPLER
from common.constraints.patterns import LETTERS, in_json_string
from common.errors import ConfigError

_SPACE = r"[ \t\n\r]*"
_LETTER = rf'(?:{LETTERS}|\\["\\/bfnrt])'
_INTEGER = "-?(?:0|[1-9][0-9]*)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    "02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"[1-9][0-9]{{3}}-{_DAY}"
_HOURS = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOURS})"
_FORMATS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}  # fmt: skip
_SCALARS = {
    "string": f'"{_LETTER}*"', "integer": _INTEGER, "number": rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{{1,2}})?",
    "boolean": "(?:true|false)", "null": "null",
}  # fmt: skip
_ANY_DEPTH = 2  # of lists and objects in each other, where a schema leaves open what stands there
_MOST_DEPTH = 32
_MOST_LETTERS = 200_000
_MOST_COUNT = 1000  # of a bound

_SILENT = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
    "$comment", "$defs", "definitions", "discriminator",
}  # fmt: skip
_OF_TYPE: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_TYPES = {*_SCALARS, "array", "object"}
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")


def regex_of_schema(schema: Any) -> str:
    """Return the expression. Raises ConfigError that names the key which is not enforced, with its place."""
    regex = _Walk(schema).of(schema, "#", 0)
    if len(regex) > _MOST_LETTERS:
        raise ConfigError(
            f"the schema comes to an expression of {len(regex)} letters, at most {_MOST_LETTERS}: {SIMPLER}"
        )
    return regex


def regex_of_calls(tools: Sequence[tuple[str, Any]]) -> str:
    """Return the expression of calls {"name": ..., "arguments": ...} of tools (name, schema). Raises as above."""
    found = []
    for name, schema in tools:
        try:
            arguments = regex_of_schema(schema)
        except ConfigError as error:
            raise ConfigError(f"the parameters of {name}: {error}") from None
        members = [(f'"name"{_SPACE}:{_SPACE}{_literal(name)}', True),
                   (f'"arguments"{_SPACE}:{_SPACE}{arguments}{_SPACE}', True)]  # fmt: skip
        found.append(rf"\{{{_SPACE}{_in_order(members)}\}}")
    return _any_of(found)


def regex_of_any_object() -> str:
    """Return the expression of JSON objects that hold lists and objects up to a fixed depth."""
    return _any_object(_ANY_DEPTH)


class _Walk:
    """One pass over a schema. at: where in it, as a JSON pointer."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def of(self, schema: Any, at: str, depth: int) -> str:
        if depth > _MOST_DEPTH:
            raise ConfigError(f"{at}: it refers to itself, or is nested deeper than {_MOST_DEPTH}; write it out")
        if schema is True or schema == {}:
            return _any_value(_ANY_DEPTH)
        if not isinstance(schema, Mapping):
            raise ConfigError(f"{at}: write a schema, an object of keywords")
        keys = {key for key in schema if key not in _SILENT and not str(key).startswith("x-")}
        alone = [key for key in _ALONE if key in keys]
        if alone:
            return self._alone(schema, keys, alone[0], at, depth)
        types = self._types(schema, keys, at)
        for key in keys - {"type"}:
            if not any(key in _OF_TYPE.get(name, ()) for name in types):
                raise ConfigError(f"{at}/{key}: {key!r} is not enforced here: remove it, and check the answer")
        return _any_of([self._of_type(name, schema, at, depth) for name in types])

    def _types(self, schema: Mapping[str, Any], keys: set[str], at: str) -> list[str]:
        given = schema.get("type")
        if "type" not in schema:  # a keyword of a type says nothing of values of others
            owners = [name for name, own in _OF_TYPE.items() if own & keys]
            given = owners[0] if len(owners) == 1 else sorted(_TYPES - {"integer"})
        types = [given] if isinstance(given, str) else given
        if not _are_texts(types) or not types or not _TYPES.issuperset(types):
            raise ConfigError(f"{at}/type: write one of {', '.join(sorted(_TYPES))}, or a list of them")
        return types

    def _of_type(self, name: str, schema: Mapping[str, Any], at: str, depth: int) -> str:
        if name == "string":
            return self._string(schema, at)
        if name == "array":
            return self._array(schema, at, depth)
        return self._object(schema, at, depth) if name == "object" else _SCALARS[name]

    def _alone(self, schema: Mapping[str, Any], keys: set[str], key: str, at: str, depth: int) -> str:
        """Return the expression of a keyword that says everything; `type` beside values must hold for all of these."""
        value, more = schema[key], keys - {key}
        if key in ("const", "enum"):
            values = [value] if key == "const" else value
            if not isinstance(values, list) or not values:
                raise ConfigError(f"{at}/enum: write a list of values, at least one")
            if more - {"type"}:
                raise ConfigError(f"{at}/{min(more - {'type'})}: it is not enforced beside {key}: remove it")
            if "type" in more:
                types = self._types(schema, set(), at)
                values = [one for one in values if any(_is_of(one, name) for name in types)]
            if not values:
                raise ConfigError(f"{at}/{key}: no value is of the type beside it")
            return _any_of([_literal(one) for one in values])
        if more:
            raise ConfigError(f"{at}/{min(more)}: it is not enforced beside {key}: write it into its schemas")
        if key == "$ref":
            return self.of(self._referred(value, at), str(value), depth + 1)
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{at}/{key}: write a list of schemas, at least one")
        if key == "allOf" and len(value) > 1:
            raise ConfigError(f"{at}/allOf: schemas that hold together are not enforced: merge them into one")
        ways = [self.of(one, f"{at}/{key}/{place}", depth + 1) for place, one in enumerate(value)]
        if key == "oneOf" and not _are_apart([self._seen(one, at) for one in value]):
            raise ConfigError(f"{at}/oneOf: a value might be of several of these, which is not ruled out: use anyOf")
        return _any_of(ways)

    def _referred(self, pointer: Any, at: str) -> Any:
        if not isinstance(pointer, str) or (pointer != "#" and not pointer.startswith("#/")):
            raise ConfigError(f"{at}/$ref: only parts of the same schema are referred to, such as #/$defs/name")
        found = self._root
        for part in pointer[1:].split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = {str(place): one for place, one in enumerate(found)}
            if not isinstance(found, Mapping) or part not in found:
                raise ConfigError(f"{at}/$ref: the schema has no {pointer}")
            found = found[part]
        return found

    def _seen(self, schema: Any, at: str) -> Any:
        for _ in range(_MOST_DEPTH):
            if not (isinstance(schema, Mapping) and "$ref" in schema):
                break
            schema = self._referred(schema["$ref"], at)
        return schema

    def _string(self, schema: Mapping[str, Any], at: str) -> str:
        least, most = _bounds(schema, "minLength", "maxLength", at)
        own = [key for key in ("pattern", "format") if key in schema]
        if len(own) + (least > 0 or most is not None) > 1:
            raise ConfigError(f"{at}/{own[0]}: of length, pattern and format one is enforced: leave the others out")
        if own == ["pattern"]:
            if not isinstance(schema["pattern"], str):
                raise ConfigError(f"{at}/pattern: write a regular expression")
            try:
                return f'"{in_json_string(schema["pattern"])}"'
            except ConfigError as error:
                raise ConfigError(f"{at}/pattern: {error}") from None
        if own:
            if not isinstance(schema["format"], str) or schema["format"] not in _FORMATS:
                raise ConfigError(f"{at}/format: {schema['format']!r:.60} is not enforced: use {', '.join(_FORMATS)}")
            return f'"{_FORMATS[schema["format"]]}"'
        return f'"{_times(_LETTER, least, most)}"'

    def _array(self, schema: Mapping[str, Any], at: str, depth: int) -> str:
        least, most = _bounds(schema, "minItems", "maxItems", at)
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        if not isinstance(first, list) or isinstance(items, list):
            raise ConfigError(f"{at}/items: write one schema for all items, and prefixItems for the first of them")
        heads = [self.of(one, f"{at}/prefixItems/{place}", depth + 1) for place, one in enumerate(first)]
        if items is False:
            most = len(heads) if most is None else min(most, len(heads))
        if most is not None and least > most:
            raise ConfigError(f"{at}/minItems: there can be no more than {most} items")
        has_rest = items is not False and (most is None or most > len(heads))
        rest = self.of(items, f"{at}/items", depth + 1) if has_rest else ""
        return rf"\[{_SPACE}{_listed(heads, rest, least, most)}\]"

    def _object(self, schema: Mapping[str, Any], at: str, depth: int) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        more = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping) or not _are_texts(required):
            raise ConfigError(f"{at}/properties: write an object of schemas, and a list of names as required")
        if not properties and not required:
            if more is True:
                return _any_object(_ANY_DEPTH)
            return _members(
                '"' + _LETTER + '*"', "" if more is False else self.of(more, f"{at}/additionalProperties", depth + 1)
            )
        unknown = [name for name in required if name not in properties]
        if unknown:
            raise ConfigError(f"{at}/required: {unknown[0]!r:.60} is not among properties: describe it there")
        members = [
            (_literal(name) + rf"{_SPACE}:{_SPACE}" + self.of(one, f"{at}/properties/{name}", depth + 1) + _SPACE,
             name in required)
            for name, one in properties.items()
        ]  # fmt: skip
        return rf"\{{{_SPACE}{_in_order(members)}\}}"


def _in_order(members: list[tuple[str, bool]]) -> str:
    """Return the expression of members in this order, with commas between; what is not required may be absent."""
    comma = f",{_SPACE}"
    first = next((place for place, (_, is_required) in enumerate(members) if is_required), None)
    if first is not None:
        before = "".join(f"(?:{member}{comma})?" for member, _ in members[:first])
        after = [f"{comma}{member}" if needed else f"(?:{comma}{member})?" for member, needed in members[first + 1 :]]
        return before + members[first][0] + "".join(after)
    ways = []
    for place, (member, _) in enumerate(members):
        ways.append(member + "".join(f"(?:{comma}{other})?" for other, _ in members[place + 1 :]))
    return f"(?:{'|'.join(ways)})?"


def _listed(heads: list[str], rest: str, least: int, most: int | None) -> str:
    """Return the expression of a list's items: the heads in order, then any number of the rest, within the bounds."""
    comma = f"{_SPACE},{_SPACE}"
    tail = ""
    if rest:
        left = None if most is None else most - len(heads)
        tail = _times(f"(?:{comma}{rest})", max(0, least - len(heads)), left)
        if not heads:
            if most == 0:
                return ""
            more = _times(f"(?:{comma}{rest})", max(0, least - 1), None if most is None else most - 1)
            return f"{rest}{more}{_SPACE}" if least else f"(?:{rest}{more}{_SPACE})?"
    for place in range(len(heads) - 1, 0, -1):
        if most is not None and place >= most:
            continue
        tail = f"{comma}{heads[place]}{tail}" if place < least else f"(?:{comma}{heads[place]}{tail})?"
    if not heads or most == 0:
        return ""
    return f"{heads[0]}{tail}{_SPACE}" if least else f"(?:{heads[0]}{tail}{_SPACE})?"


def _members(name: str, value: str) -> str:
    """Return the expression of an object with any number of such members; of none without a value."""
    if not value:
        return rf"\{{{_SPACE}\}}"
    member = rf"{name}{_SPACE}:{_SPACE}{value}{_SPACE}"
    return rf"\{{{_SPACE}(?:{member}(?:,{_SPACE}{member})*)?\}}"


def _any_value(depth: int) -> str:
    scalars = [_SCALARS[name] for name in ("string", "number", "boolean", "null")]
    return _any_of([*scalars, _any_array(depth), _any_object(depth)] if depth else scalars)


def _any_array(depth: int) -> str:
    value = _any_value(depth - 1)
    return rf"\[{_SPACE}(?:{value}{_SPACE}(?:,{_SPACE}{value}{_SPACE})*)?\]"


def _any_object(depth: int) -> str:
    return _members(_SCALARS["string"], _any_value(depth - 1))


def _any_of(ways: list[str]) -> str:
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


def _times(one: str, least: int, most: int | None) -> str:
    if most is None:
        return f"{one}*" if not least else f"{one}{{{least},}}"
    return f"{one}{{{least},{most}}}"


def _bounds(schema: Mapping[str, Any], low: str, high: str, at: str) -> tuple[int, int | None]:
    for key in (low, high):
        value = schema.get(key, 0)
        if type(value) is not int or not 0 <= value <= _MOST_COUNT:
            raise ConfigError(f"{at}/{key}: write a number from 0 to {_MOST_COUNT}")
    least, most = schema.get(low, 0), schema.get(high)
    if most is not None and most < least:
        raise ConfigError(f"{at}/{high}: it is below {low}")
    return least, most


def _literal(value: Any) -> str:
    """Return the expression of one value, as JSON writes it."""
    if isinstance(value, Mapping):
        members = [_literal(name) + f"{_SPACE}:{_SPACE}" + _literal(one) for name, one in value.items()]
        return rf"\{{{_SPACE}" + f"{_SPACE},{_SPACE}".join(members) + rf"{_SPACE}\}}"
    if isinstance(value, list):
        return rf"\[{_SPACE}" + f"{_SPACE},{_SPACE}".join(map(_literal, value)) + rf"{_SPACE}\]"
    return re.sub(r"([\\.+*?()|\[\]{}^$#&~-])", r"\\\1", json.dumps(value, ensure_ascii=False))


def _are_texts(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(one, str) for one in given)


def _is_of(value: Any, name: str) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    checks: dict[str, Callable[[], bool]] = {
        "string": lambda: isinstance(value, str), "number": lambda: is_number,
        "integer": lambda: is_number and value == int(value), "boolean": lambda: isinstance(value, bool),
        "null": lambda: value is None, "array": lambda: isinstance(value, list),
        "object": lambda: isinstance(value, Mapping),
    }  # fmt: skip
    return checks[name]()


def _are_apart(schemas: list[Any]) -> bool:
    """Return whether no value can be of two of the schemas: by their types, or by a required property that tells."""
    return all(_is_apart(one, other) for place, one in enumerate(schemas) for other in schemas[:place])


def _is_apart(one: Any, other: Any) -> bool:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    if (values := _values(one)) is not None and (others := _values(other)) is not None:
        return not any(value == another for value in values for another in others)
    types, other_types = _types_of(one), _types_of(other)
    if types and other_types and not types & other_types:
        return True
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    own, others_own = one.get("properties", {}), other.get("properties", {})
    return types == other_types == {"object"} and any(
        isinstance(own.get(name), Mapping) and isinstance(others_own.get(name), Mapping)
        and (values := _values(own[name])) is not None and (others := _values(others_own[name])) is not None
        and not any(value == another for value in values for another in others)
        for name in shared
    )  # fmt: skip


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, list) else None


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type", ())
    types = {given} if isinstance(given, str) else set(given)
    return types | {"number"} if "integer" in types else types
