"""From a format to an automaton over a tokenizer's tokens; each is made once and kept.

The library outlines-core (extra `structured`) makes an automaton over bytes of a regular expression. A list of texts
needs no library.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np

from common.constraints.automaton import NEVER, Automaton
from common.constraints.formats import Format
from common.constraints.lift import ByteAutomaton, Trie, lift
from common.constraints.patterns import in_ascii
from common.constraints.schema import regex_of_any_object, regex_of_schema
from common.errors import ConfigError, first_line

_MOST_KEPT = 64  # automata
_MOST_STATES = 4000  # of bytes


class Compiler:
    """Compiles formats. bytes_of: returns the bytes of every token that a text may hold, by id; it is called once, and
    raises ConfigError where tokens have none. May be called from several threads."""

    def __init__(self, bytes_of: Callable[[], Mapping[int, bytes]], vocab_size: int | None) -> None:
        self._bytes_of = bytes_of
        self._vocab_size = vocab_size
        self._making, self._looking = Lock(), Lock()
        self._kept: OrderedDict[Format, Automaton | ConfigError] = OrderedDict()

    def automaton(self, format: Format) -> Automaton:
        """Return the format's automaton. Takes from milliseconds to seconds the first time, in which other threads get
        those that are kept.

        Raises ConfigError for what cannot be enforced, by its key, and where the library is missing.
        """
        found = self._look(format)
        if found is None:
            with self._making:
                found = self._look(format) or self._keep(format)
        if isinstance(found, ConfigError):
            raise ConfigError(str(found))
        return found

    def _look(self, format: Format) -> Automaton | ConfigError | None:
        with self._looking:
            if format in self._kept:
                self._kept.move_to_end(format)
            return self._kept.get(format)

    def _keep(self, format: Format) -> Automaton | ConfigError:
        found: Automaton | ConfigError
        try:
            found = self._made(format)
        except ConfigError as error:
            found = error
        with self._looking:
            self._kept[format] = found
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return found

    def _made(self, format: Format) -> Automaton:
        automaton = lift(_byte_automaton(format), self._trie)
        if automaton is None:
            raise ConfigError("no text of this model's tokens has this format; loosen it")
        return automaton

    @cached_property
    def _trie(self) -> Trie:
        found = self._bytes_of()
        return Trie.of(found, max(found, default=0) + 1 if self._vocab_size is None else self._vocab_size)


def _byte_automaton(format: Format) -> ByteAutomaton:
    if format.kind == "choice":
        return ByteAutomaton.of_texts(tuple(json.loads(format.text)))
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
        raise ConfigError(f"it does not compile ({first_line(error):.200}): write it more simply") from None
    rows: Mapping[int, Mapping[int, int]] = index.get_transitions()
    (begin,) = [target for byte, target in rows[index.get_initial_state()].items() if byte == 0]
    return _dense(rows, begin, index.get_final_states())


def _dense(rows: Mapping[int, Mapping[int, int]], start: int, finals: Any) -> ByteAutomaton:
    states = sorted({start, *rows, *(target for row in rows.values() for target in row.values())})
    if len(states) > _MOST_STATES:
        raise ConfigError(f"it takes {len(states)} states, at most {_MOST_STATES} are compiled: write shorter bounds")
    place_of = {state: place for place, state in enumerate(states)}
    next_S256 = np.full((len(states), 256), NEVER, np.int32)
    for state, row in rows.items():
        for byte, target in row.items():
            if byte < 256:
                next_S256[place_of[state], byte] = place_of[target]
    is_final_S = np.zeros(len(states), np.bool_)
    is_final_S[[place_of[state] for state in finals]] = True
    return ByteAutomaton(next_S256, is_final_S, place_of[start])
