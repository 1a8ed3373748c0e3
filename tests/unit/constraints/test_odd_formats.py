"""Formats as clumsy clients write them: a sentence that says what is wrong, and no text that is not of the format."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest

from common.constraints import Compiler, Format, Recent, made, of_structured_outputs
from common.constraints.apart import PassingError
from common.constraints.automaton import FAR, distances
from common.errors import ConfigError

COMPILER = Compiler(lambda: {byte: bytes([byte]) for byte in range(256)}, 256, made)
MISSHAPEN: list[tuple[Any, str]] = [
    ({"type": "object", "properties": {"a": {}}, "required": [{}]}, "#/properties"),
    ({"type": [["string"]]}, "#/type"),
    ({"type": None}, "#/type"),
    ({"type": "string", "format": ["date"]}, "#/format"),
    ({"type": "string", "pattern": None}, "#/pattern"),
    ({"oneOf": [{"type": "object", "required": 3}, {"type": "object"}]}, "#/oneOf/0/properties"),
    ({"oneOf": [{"type": [["x"]]}, {"type": "null"}]}, "#/oneOf/0/type"),
    ({"oneOf": [1, 2]}, "#/oneOf/0"),
    ({"type": "integer", "enum": [math.inf, 3]}, "no JSON"),
    ({"const": math.nan}, "no JSON"),
    ({"const": {1, 2}}, "no JSON"),
    ({"const": "\ud800"}, "surrogate"),
]


@pytest.mark.parametrize(("schema", "why"), MISSHAPEN, ids=ascii)
def test_a_misshapen_schema_is_refused_by_its_place(schema: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        format = of_structured_outputs({"json": schema})
        assert format is not None
        COMPILER.automaton(format)


@pytest.mark.parametrize(
    "asked",
    [{"choice": 0}, {"choice": False}, {"regex": 0}, {"regex": False}, {"choice": ["a\ud800"]}, {"regex": "\ud800"}],
    ids=ascii,
)
def test_what_is_no_format_is_not_passed_over(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^(choice|regex): "):
        of_structured_outputs(asked)


def test_false_is_a_schema_that_nothing_meets_and_no_absence() -> None:
    format = of_structured_outputs({"json": False})
    assert format is not None
    with pytest.raises(ConfigError):
        COMPILER.automaton(format)
    with pytest.raises(ConfigError, match="junk is not enforced here"):
        of_structured_outputs({"junk": False})
    assert of_structured_outputs({"json_object": False, "disable_fallback": False, "regex": None}) is None


@pytest.mark.parametrize(
    ("regex", "why"),
    [
        ("(?x)[^ a]{8}", "the flag x is not compiled"),
        ("a(?ix:b c)", "the flag x is not compiled"),
        (r"a\Zb", "at its ends only"),
        (r"[^\s\S]", "no text matches it"),
    ],
)
def test_an_expression_that_the_library_reads_otherwise_is_refused(regex: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        COMPILER.automaton(Format("regex", regex))


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@pytest.mark.parametrize("regex", ["[[a]b]", "[a&&b]", "[+--]", "[a~~b]", "(?=a)b", "(?<!a)b", "^a|b$", "a^b"])
def test_what_the_library_reads_otherwise_is_refused(regex: str) -> None:
    with pytest.raises(ConfigError, match=r"in front of|ahead or back|at its ends only"):
        COMPILER.automaton(Format("regex", regex))


@pytest.mark.parametrize(
    ("regex", "why"),
    [
        ("(" * 500 + "a" + ")" * 500, "nested too deeply"),
        ("(?#b)a", "a comment is not compiled"),
        ("(a)(?(1)b|c)", "refers to another group"),
        ("(?P<a>b)(?P=a)", "refers to another group"),
        (r"(a)\1", r"\1 is not compiled"),
        (r"\0", r"\0 is not compiled"),
    ],
)
def test_what_the_library_has_no_word_for_is_named(regex: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        COMPILER.automaton(Format("regex", regex))


@pytest.mark.parametrize("regex", ["(?:yes)?+yes", "[0-9]*+7", "a{2}+", "a{,3}+", r"\?++"])
def test_a_quantifier_that_gives_nothing_back_is_refused(regex: str) -> None:
    with pytest.raises(ConfigError, match=r"leave the \+ out|no regular expression"):  # Python 3.10 has none of them
        COMPILER.automaton(Format("regex", regex))
    with pytest.raises(ConfigError, match=r"leave the \+ out|no regular expression"):
        COMPILER.automaton(Format("json", json.dumps({"type": "string", "pattern": regex})))


def test_an_expression_that_is_too_long_is_refused_before_it_is_kept() -> None:
    with pytest.raises(ConfigError, match="at most 20000"):
        of_structured_outputs({"regex": "\U0001f600" * 20_001})


def test_automata_are_kept_by_their_bytes() -> None:
    kept: Recent[str, str] = Recent(most_bytes=100)
    for name, num_bytes in (("a", 40), ("b", 40), ("a", 50), ("c", 20), ("d", 0)):
        assert kept.get(name) in (None, name)
        kept.keep(name, name, num_bytes)
    assert "b" not in kept and kept.get("a") == "a" and len(kept) == 3
    kept.keep("large", "large", 1000)
    assert kept.get("large") == "large" and len(kept) == 1, "the last one stays"
    for number in range(1000):
        kept.keep(str(number), "", 0)
    assert len(kept) == 64


@pytest.mark.parametrize(
    ("regex", "texts", "others"),
    [
        ("^[0-9]+$", ["1", "23"], ["", "a", "^1"]),
        (r"[^\W_]", ["a", "0"], ["_", "é", "-"]),
        (r"[\[\D]", ["[", "x", "é"], ["1"]),
        (r"[(?=]", ["=", "("], ["a"]),
        (r"\^a\$", ["^a$"], ["a"]),
        (r"\<b\>[a-z]\</b\>[\<]", ["<b>x</b><"], ["bx/b"]),
        ("a{,2}b{1,}", ["b", "aabb"], ["aaab", "a"]),
        ("{a} a{1 {} b{,}", ["{a} a{1 {} ", "{a} a{1 {} bb"], ["aa"]),
    ],
)
def test_expressions_mean_what_they_say(regex: str, texts: list[str], others: list[str]) -> None:
    pytest.importorskip("outlines_core", reason="needs the extra structured")
    automaton = COMPILER.automaton(Format("regex", regex))

    def accepts(text: str) -> bool:
        state = automaton.start
        for byte in text.encode():
            state = int(automaton.next_QC[state, automaton.class_V[byte]]) if state >= 0 else state
        return state >= 0 and bool(automaton.is_final_Q[state])

    assert all(map(accepts, texts)) and not any(map(accepts, others))


def test_what_failed_by_the_machine_is_tried_again() -> None:
    tries = []

    def make(format: Format, trie: Any) -> Any:
        tries.append(format)
        if len(tries) == 1:
            raise PassingError("busy")
        return made(format, trie)

    compiler, format = Compiler(lambda: {97: b"a"}, 256, make), Format("choice", '["a"]')
    with pytest.raises(ConfigError, match="busy"):
        compiler.automaton(format)
    assert not compiler.has(format)
    assert compiler.automaton(format).shortest == 1 and compiler.has(format) and len(tries) == 2


def test_distances_of_a_random_graph_are_those_of_rounds() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        source_E, target_E = random.integers(0, 40, (2, 60))
        is_final_Q = random.random(40) < 0.05
        wanted_Q = np.where(is_final_Q, 0, FAR)
        for _ in range(40):
            np.minimum.at(wanted_Q, source_E, np.minimum(wanted_Q[target_E] + 1, FAR))
        assert distances(source_E, target_E, is_final_Q).tolist() == wanted_Q.tolist()
