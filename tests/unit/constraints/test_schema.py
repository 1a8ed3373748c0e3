"""Schemas and regular expressions: what is accepted is valid, what is not enforced is refused by its key."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from common.constraints import MASK, Automaton, Compiler, Format, made
from common.errors import ConfigError
from tests.fillings import drawn
from tests.schemas import SUITE

pytest.importorskip("outlines_core", reason="needs the extra structured")

EOS = 300
# Bytes, and a few texts of several that cross the syntax of JSON.
TEXTS = ['{"', '":', '": "', '", "', "true", "}}", '"}', "12", ", ", "é", "20", "-0", "\n  ", "[]", "null", "e+1"]
TOKENS = {byte: bytes([byte]) for byte in range(256)} | {256 + n: text.encode() for n, text in enumerate(TEXTS)}
COMPILER = Compiler(lambda: TOKENS, 320, made)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}, "days": {"type": "integer"},
    },
    "required": ["city", "unit"], "additionalProperties": False,
}  # fmt: skip
DETAIL = {
    "type": "object", "properties": {"wind": {"type": "boolean"}, "level": {"type": "integer"}},
    "required": ["wind", "level"],
}  # fmt: skip
ACCEPTED: list[Any] = [
    WEATHER,
    {"type": "object", "properties": {"name": {"const": "get_weather"}, "arguments": {
        "type": "object", "properties": {"city": {"type": "string"}, "when": {"type": "string", "format": "date"},
        "detail": DETAIL}, "required": ["city", "when", "detail"]}}, "required": ["name", "arguments"]},
    {"type": "object", "properties": {f"field_{n}": {"type": kind} for n, kind in enumerate(["string", "integer"] * 2)},
     "required": [f"field_{n}" for n in range(4)]},
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "tags": {"type": "array", "items": {
        "type": "string", "minLength": 1, "maxLength": 3}, "maxItems": 3}}, "required": ["name", "tags"]},
    {"enum": ["yes", "no", 3, None, {"a": [1, "x"]}]},
    {"const": 'a "quote" and \\ and é\n'},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "pattern": "^[A-Z]{2}-\\d+$"},
    {"type": "string", "pattern": "b+"},
    {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"type": "integer"}, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}, {"type": "null"}], "maxItems": 2},
    {"type": "array", "maxItems": 0},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}},
    {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}},
     "required": ["b"]},
    {"type": "object", "properties": {'say "hi"\\': {"type": "null"}}, "required": ['say "hi"\\']},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}, {"$ref": "#/$defs/detail"}],
     "$defs": {"detail": DETAIL}},
    {"anyOf": [{"$ref": "#/$defs/any/anyOf/1"}, {"$ref": "#/$defs/a%20b~1%C3%A9"}],
     "$defs": {"any": {"anyOf": [{"type": "null"}, DETAIL]}, "a b/é": {"const": 1}}},
    {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]},
    {"oneOf": [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"]},
    {"allOf": [{"type": "boolean"}]},
    {"type": ["string", "null"], "maxLength": 2},
    {"type": "string", "enum": ["a", 1, "b"]},
    {"type": "object"},
    {},
    True,
]  # fmt: skip
REFUSED: dict[str, Any] = {
    "minimum": {"type": "integer", "minimum": 1}, "multipleOf": {"type": "number", "multipleOf": 2},
    "allOf": {"allOf": [{"type": "integer"}, {"enum": [1]}]}, "uniqueItems": {"type": "array", "uniqueItems": True},
    "minProperties": {"type": "object", "minProperties": 1}, "not": {"not": {"type": "null"}},
    "patternProperties": {"type": "object", "patternProperties": {"a": {}}},
    "format": {"type": "string", "format": "ipv4"},
    "if": {"if": {"type": "null"}}, "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "contains": {"type": "array", "contains": {}}, "required": {"type": "object", "required": ["a"]},
    "refers to itself": {"properties": {"a": {"$ref": "#"}}}, "$ref": {"$ref": "http://example.com/a"},
    "dependentRequired": {"type": "object", "dependentRequired": {}}, "pattern": {"type": "string", "pattern": "."},
    "minLength": {"type": "string", "minLength": 5000}, "maxLength": {"type": "string", "minLength": 3, "maxLength": 2},
    "type": {"type": "date"}, "enum": {"enum": []},
}  # fmt: skip


def texts(own: Automaton, count: int, seed: int, longest: int = 40) -> list[str]:
    """Random texts of an automaton, of random lengths."""
    closed, rng, found = own.closed([EOS]), np.random.default_rng(seed), []
    first = {int(token_class): id for id, token_class in reversed([*enumerate(closed.class_V.tolist())])}
    for _ in range(count):
        width = own.shortest + int(rng.integers(0, longest))
        weight_WC = rng.standard_normal((width, closed.num_classes)) * 3
        path_W = drawn(closed, np.full(width, MASK, np.int32), weight_WC, rng)
        ids = [first[token_class] for token_class in path_W if token_class != closed.end_class]
        found.append(b"".join(TOKENS[id] for id in ids).decode())
    return found


@pytest.mark.parametrize("schema", ACCEPTED, ids=lambda schema: json.dumps(schema)[:60])
def test_every_text_of_a_schema_is_valid(schema: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    own = COMPILER.automaton(Format("json", json.dumps(schema)))
    for text in texts(own, 25, seed=len(json.dumps(schema))):
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITE)
def test_texts_of_published_cases_are_valid(name: str) -> None:
    jsonschema, schema = pytest.importorskip("jsonschema"), SUITE[name].schema
    for text in texts(COMPILER.automaton(Format("json", json.dumps(schema))), 10, seed=len(name)):
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


def test_what_published_cases_refuse_is_refused() -> None:
    """Some values that they accept are not written: with keys that are not named, or in another order."""
    num_accepted = {True: 0, False: 0}
    for case in SUITE.values():
        own = COMPILER.automaton(Format("json", json.dumps(case.schema)))
        for is_valid, values in ((True, case.valid), (False, case.invalid)):
            for value in values:
                written = json.dumps(value, ensure_ascii=False).encode()
                state = own.after(own.start, own.class_V[list(written)])
                num_accepted[is_valid] += state >= 0 and bool(own.is_final_Q[state])
    assert num_accepted[False] == 0
    assert num_accepted[True] > sum(len(case.valid) for case in SUITE.values()) / 2


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_enforced_is_refused_by_its_key(key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)) as refused:
        COMPILER.automaton(Format("json", json.dumps(REFUSED[key])))
    assert len(str(refused.value)) < 300 and "#" in str(refused.value)


def test_any_object_is_one_of_json() -> None:
    for text in texts(COMPILER.automaton(Format("json_object")), 25, seed=1):
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "regex",
    [
        r"1(?:x2)*(?:, ?[a-c]+(?:-[a-c]+)*){0,3}",
        r"\d{2}|\w+é?",
        r"a*",
        r"[\s\S]{0,4}",
        r"Answer: \d+",
        r"[\d.]+",
        r"\Aa+\Z",
    ],
)
def test_a_regular_expression_takes_what_python_says_in_ascii(regex: str) -> None:
    own = COMPILER.automaton(Format("regex", regex))
    pattern, draws = re.compile(regex, re.ASCII), random.Random(0)
    one_byte = own.class_V[:256]
    for text in texts(own, 40, seed=2, longest=8):
        assert pattern.fullmatch(text), text
        letters = list(text)
        for _ in range(3):
            place = draws.randrange(len(letters) + 1)
            letters[place : place + draws.randrange(2)] = [draws.choice('ax12, -é"c٣\n')]
            changed = "".join(letters)
            state = own.after(own.start, one_byte[list(changed.encode())])
            assert (state >= 0 and bool(own.is_final_Q[state])) == (pattern.fullmatch(changed) is not None), changed


@pytest.mark.parametrize(
    ("regex", "why"),
    [("a)|(b", "no regular expression"), (r"a(?=b)", "looks ahead"), (r"\bab", "looks ahead"), ("(", "no")],
)
def test_what_is_no_expression_of_an_automaton_is_refused(regex: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        COMPILER.automaton(Format("regex", regex))


def test_a_format_is_compiled_once() -> None:
    format = Format("choice", json.dumps(["yes", "no", "not sure"]))
    own = COMPILER.automaton(format)
    assert COMPILER.automaton(format) is own
    assert set(texts(own, 60, seed=0, longest=12)) == {"yes", "no", "not sure"}
