"""Make the automaton of a format over a tokenizer's tokens.

The library outlines-core (extra `structured`) makes an automaton over bytes of a regular expression. A list of texts
needs no library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from common.constraints.automaton import NEVER, Automaton
from common.constraints.formats import Format
from common.constraints.lift import SIMPLER, ByteAutomaton, Trie, lift
from common.constraints.patterns import in_ascii
from common.constraints.schema import regex_of_any_object, regex_of_calls, regex_of_schema
from common.errors import ConfigError, first_line

_MOST_STATES = 4000  # of bytes


def made(format: Format, trie: Trie) -> Automaton:
    """Return the format's automaton. Takes any time and memory. Raises ConfigError."""
    automaton = lift(_byte_automaton(format), trie)
    if automaton is None:
        raise ConfigError("no text of this model's tokens has this format; loosen it")
    return automaton


def _byte_automaton(format: Format) -> ByteAutomaton:
    if format.kind == "choice":
        return ByteAutomaton.of_texts(tuple(json.loads(format.text)))
    if format.kind == "call":
        return of_regex(regex_of_calls(json.loads(format.text)))
    if format.kind == "json_object":
        return of_regex(regex_of_any_object())
    return of_regex(in_ascii(format.text) if format.kind == "regex" else regex_of_schema(json.loads(format.text)))


def of_regex(regex: str) -> ByteAutomaton:
    """Return the automaton of the texts that match as a whole. Raises ConfigError."""
    try:
        from outlines_core import Index, Vocabulary
    except ImportError:
        raise ConfigError("formats need the library outlines-core: pip install 'lopa[structured]'") from None
    try:
        # Without \z the library drops edges from final states, and it takes no expression that may begin with its end;
        # 256 is the token that ends its texts.
        index = Index(f"\\x00(?:{regex})\\z", Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)}))
    except ValueError as error:
        why = first_line(error).removeprefix("Failed to build DFA ")
        if "no transitions" in why:
            raise ConfigError("no text matches it: write one that some text does") from None
        raise ConfigError(
            f"it does not compile ({why:.200}): docs/structured.md says what is taken; write it more simply"
        ) from None
    rows: Mapping[int, Mapping[int, int]] = index.get_transitions()
    (begin,) = [target for byte, target in rows[index.get_initial_state()].items() if byte == 0]
    return _dense(rows, begin, index.get_final_states())


def _dense(rows: Mapping[int, Mapping[int, int]], start: int, finals: Any) -> ByteAutomaton:
    states = sorted({start, *rows, *(target for row in rows.values() for target in row.values())})
    if len(states) > _MOST_STATES:
        raise ConfigError(f"it takes {len(states)} states, at most {_MOST_STATES} are compiled: {SIMPLER}")
    place_of = {state: place for place, state in enumerate(states)}
    next_S256 = np.full((len(states), 256), NEVER, np.int32)
    for state, row in rows.items():
        for byte, target in row.items():
            if byte < 256:
                next_S256[place_of[state], byte] = place_of[target]
    is_final_S = np.zeros(len(states), np.bool_)
    is_final_S[[place_of[state] for state in finals]] = True
    return ByteAutomaton(next_S256, is_final_S, place_of[start])
