"""Automata on a connection: one is as large as a vocabulary, so it is sent once and named by its key afterwards."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

from common.constraints import Automaton, Recent
from common.serving.messages import Add


class SentAutomata:
    """The automata that one direction of a connection has brought, the one used last at the end. Each side has one;
    both keep and drop the same, since they see the same messages in the same order."""

    def __init__(self) -> None:
        self._kept: Recent[str, Automaton] = Recent()

    def packed(self, messages: Sequence[Any]) -> bytes:
        """Return a pickle that `unpacked` of the other side reads."""
        if not any(isinstance(message, Add) and message.request.automaton is not None for message in messages):
            return pickle.dumps(list(messages), protocol=pickle.HIGHEST_PROTOCOL)
        body = io.BytesIO()
        _Pickler(body, self).dump(list(messages))
        return body.getvalue()

    def unpacked(self, body: bytes) -> list[Any]:
        messages: list[Any] = _Unpickler(io.BytesIO(body), self).load()
        return messages

    def name(self, automaton: Automaton) -> tuple[str, bytes | None]:
        """Return what is sent in its place: its key, and itself where the other side lacks it."""
        is_there = automaton.key in self._kept
        self._keep(automaton)
        return automaton.key, None if is_there else pickle.dumps(automaton, protocol=pickle.HIGHEST_PROTOCOL)

    def named(self, key: str, body: bytes | None) -> Automaton:
        automaton: Automaton | None = self._kept.get(key) if body is None else pickle.loads(body)
        assert automaton is not None, "both sides keep the same"
        self._keep(automaton)
        return automaton

    def _keep(self, automaton: Automaton) -> None:
        self._kept.keep(automaton.key, automaton, automaton.num_bytes)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, sent: SentAutomata) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._sent = sent

    def persistent_id(self, obj: Any) -> Any:
        return self._sent.name(obj) if isinstance(obj, Automaton) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, sent: SentAutomata) -> None:
        super().__init__(file)
        self._sent = sent

    def persistent_load(self, pid: Any) -> Any:
        return self._sent.named(*pid)
