"""Formats' automata over a tokenizer's tokens: each is made once, in a process with limits, and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from threading import Lock

from common.constraints.apart import PassingError, made_apart
from common.constraints.automaton import Automaton
from common.constraints.formats import Format
from common.constraints.lift import Trie
from common.constraints.recent import Recent
from common.errors import ConfigError


class Compiler:
    """Compiles formats. bytes_of: returns the bytes of every token that a text may hold, by id; it is called once, and
    raises ConfigError where tokens have none. make: `made`, or what has the same done in a process with limits. May be
    called from several threads."""

    def __init__(
        self,
        bytes_of: Callable[[], Mapping[int, bytes]],
        vocab_size: int | None,
        make: Callable[[Format, Trie], Automaton] = made_apart,
    ) -> None:
        self._bytes_of = bytes_of
        self._vocab_size = vocab_size
        self._make = make
        self._making, self._looking = Lock(), Lock()
        self._kept: Recent[bytes, Automaton | ConfigError] = Recent()

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

    def has(self, format: Format) -> bool:
        """Return whether `automaton` would take no time."""
        return self._look(format) is not None

    def _look(self, format: Format) -> Automaton | ConfigError | None:
        with self._looking:
            return self._kept.get(format.digest)

    def _keep(self, format: Format) -> Automaton | ConfigError:
        found: Automaton | ConfigError
        try:
            found = self._make(format, self._trie)
        except PassingError as error:
            return error
        except ConfigError as error:
            found = error
        with self._looking:
            self._kept.keep(format.digest, found, found.num_bytes if isinstance(found, Automaton) else 0)
        return found

    @cached_property
    def _trie(self) -> Trie:
        found = self._bytes_of()
        return Trie.of(found, max(found, default=0) + 1 if self._vocab_size is None else self._vocab_size)
