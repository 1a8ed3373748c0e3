"""What an answer is held to, as OpenAI's and vLLM's APIs name it: `response_format` and `structured_outputs`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from common.constraints.patterns import require_short
from common.errors import ConfigError, first_line

_OF_OUTPUTS = ("json", "regex", "choice", "json_object")
# Fields of vLLM's object that its clients send as false.
_FLAGS = ("json_object", "disable_any_whitespace", "disable_additional_properties", "disable_fallback")
_MOST_CHOICES = 1000
_MOST_LETTERS = 200_000
_MOST_CHOSEN = 20_000  # bytes of all texts: each may be a state


class Format(NamedTuple):
    """kind: what `text` is: a JSON Schema, a regular expression, a JSON list of texts, of (name, schema of arguments)
    of the tools of which one is called; of any object nothing."""

    kind: Literal["json", "regex", "choice", "json_object", "call"]
    text: str = ""

    @property
    def digest(self) -> bytes:
        """A key that is short however long the text is."""
        return hashlib.sha256(f"{self.kind} {self.text}".encode()).digest()


def of_response_format(given: Any) -> Format | None:
    """Read `response_format`; None: any text. Raises ConfigError."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise ConfigError("write type: one of text, json_object, json_schema")
    own = ("type", "json_schema") if kind == "json_schema" else ("type",)
    other = next((name for name, value in given.items() if name not in own and value is not None), None)
    if other is not None:
        raise ConfigError(f"{other:.60} has no place beside type {kind}: write type json_schema and a json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        return Format("json_object")
    named = given.get("json_schema")
    if not isinstance(named, Mapping) or "schema" not in named:
        raise ConfigError("json_schema: write an object with a name and a schema")
    return _of_schema(named["schema"])


def of_structured_outputs(given: Any) -> Format | None:
    """Read `structured_outputs`; None: any text. Raises ConfigError."""
    if not isinstance(given, Mapping):
        raise ConfigError("write an object with one of json, regex and choice")
    asked = {
        name: value for name, value in given.items() if value is not None and not (value is False and name in _FLAGS)
    }
    if not asked:
        return None
    unknown = [name for name in asked if name not in _OF_OUTPUTS]
    if unknown:
        raise ConfigError(f"{unknown[0]:.60} is not enforced here: write json, regex or choice")
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} cannot both hold: leave one")
    ((name, value),) = asked.items()
    if name == "json_object":
        return Format("json_object")
    if name == "json":
        return _of_schema(_read(value) if isinstance(value, str) else value)
    if name == "regex":
        if not isinstance(value, str):
            raise ConfigError("regex: write a regular expression")
        require_short(value, "regex: it")
        _require_whole(value, "regex")
        return Format("regex", value)
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise ConfigError("choice: write a list of texts, one at least and none of them empty")
    if len(value) > _MOST_CHOICES:
        raise ConfigError(f"choice: {len(value)} texts, at most {_MOST_CHOICES} can be given: send fewer")
    _require_whole("".join(value), "choice")
    length = sum(len(one.encode()) for one in value)
    if length > _MOST_CHOSEN:
        raise ConfigError(
            f"choice: the texts have {length} bytes together, at most {_MOST_CHOSEN} can be given: send fewer"
        )
    return Format("choice", json.dumps(list(dict.fromkeys(value))))


def of_calls(tools: Sequence[tuple[str, Mapping[str, Any]]]) -> Format:
    """Return the format of a call of one of the tools (name, schema of its arguments). Raises ConfigError."""
    return Format("call", _schema_text([*map(list, tools)]))


def _of_schema(schema: Any) -> Format:
    if not isinstance(schema, (Mapping, bool)):
        raise ConfigError("json: write a schema, an object of keywords")
    return Format("json", _schema_text(schema))


def _schema_text(schema: Any) -> str:
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # NaN is read by Python's JSON, and is none
        raise ConfigError(f"json: the schema is no JSON ({first_line(error):.100})") from None
    _require_whole(text, "json")
    if len(text) > _MOST_LETTERS:
        raise ConfigError(f"the schema has {len(text)} letters, at most {_MOST_LETTERS}: shorten it")
    return text


def _require_whole(text: str, name: str) -> None:
    """Raise ConfigError for half a surrogate pair, which no answer can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name}: half a surrogate pair is no letter: write the whole, or remove it") from None


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError("json: the text is no JSON; write the schema as an object") from None
