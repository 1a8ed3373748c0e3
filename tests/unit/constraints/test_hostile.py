"""Formats that would take all time or memory are refused in a sentence, each within its limit."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from common.constraints import Compiler, Format, made, made_apart, of_structured_outputs
from common.errors import ConfigError

TOKENS = {byte: bytes([byte]) for byte in range(256)}
COMPILER = Compiler(lambda: TOKENS, 256, partial(made_apart, cpu_seconds=1))
DOUBLING = {
    "$defs": {
        f"d{n}": {"properties": {key: {"$ref": f"#/$defs/d{n + 1}"} for key in "ab"}, "required": ["a", "b"]}
        for n in range(14)
    },
    "$ref": "#/$defs/d0",
}  # fmt: skip
DOUBLING["$defs"]["d14"] = {"type": "null"}  # type: ignore[index]
HOSTILE: dict[str, tuple[str, Any, str]] = {
    "nested bounds": ("regex", "((a{1,50}){1,50}){1,50}", "more than . (s|GiB) to compile: write it more simply"),
    "many ways": ("regex", "(?:a|b)*a(?:a|b){18}", "to compile|states"),
    "many texts": ("regex", "|".join(f"w{n}x{n * 7}" for n in range(1500)), "at most 4000 .* fewer values"),
    "one definition twice in each": ("json", json.dumps(DOUBLING), "letters, at most|to compile"),
    "deep lists": ("json", '{"items":' * 60 + "{}" + "}" * 60, "nested deeper"),
    "5,000 values": ("json", json.dumps({"enum": [f"text {n * 7919}" for n in range(5000)]}), "states|to compile"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_what_takes_too_much_is_refused(name: str) -> None:
    pytest.importorskip("outlines_core", reason="needs the extra structured")
    kind, text, why = HOSTILE[name]
    with pytest.raises(ConfigError, match=why) as refused:
        COMPILER.automaton(Format(kind, text))  # type: ignore[arg-type]
    assert len(str(refused.value)) < 300


def test_an_automaton_that_passes_would_wait_for_is_refused() -> None:
    """Each text has a token of its own at each place, so that states times classes are many."""
    tokens = {256 * first + last: bytes([first, last]) for first in range(256) for last in range(256)}
    texts = [bytes([97 + n % 26, 97 + n // 26 % 26]).decode() * 20 for n in range(450)]
    compiler = Compiler(lambda: TOKENS | {id + 256: text for id, text in tokens.items()}, 2**17)
    with pytest.raises(ConfigError, match="classes of tokens"):
        compiler.automaton(Format("choice", json.dumps(texts)))


@pytest.mark.parametrize(("number", "why"), [(1_000, "states, at most 4000"), (20_000, "letters, at most 200000")])
def test_an_enum_that_is_too_large_is_told_to_hold_fewer(number: int, why: str) -> None:
    pytest.importorskip("outlines_core", reason="needs the extra structured")
    values = json.dumps({"enum": [f"text {n * 7919}" for n in range(number)]})
    with pytest.raises(ConfigError, match=f"{why}.* fewer values"):
        COMPILER.automaton(Format("json", values))


def test_texts_of_too_many_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 20000"):
        of_structured_outputs({"choice": ["a" * 20_001]})
    with pytest.raises(ConfigError, match="at most 1000"):
        of_structured_outputs({"choice": [str(n) for n in range(10_000)]})


def test_a_format_is_the_same_from_another_process() -> None:
    format = Format("choice", json.dumps(["yes", "no", "not sure"]))
    assert COMPILER.automaton(format).key == Compiler(lambda: TOKENS, 256, made).automaton(format).key
