"""What whoever runs the server asks of an engine beside answers: to pause, to take other weights, to give memory back.

No answer is of two versions of the weights. An order waits until nothing is decoded, and lets nothing begin meanwhile;
what waits then is answered by the new weights. From the reading of weights to their coming into force, which all
replicas do once all have read, nothing begins either.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from common.decoding import DropWeights, EngineCore, ForgetKV, Hold, Order, PutWeights, ReadWeights
from common.errors import EngineError
from common.serving.engine.passes import CountedEngine
from common.serving.messages import Ask, Continue, Obeyed, Pause

BUSY = 409
_AMID = (
    "requests are held amid their answers, which two versions of the weights would mix: POST /continue_generation or "
    "/abort_request first"
)
_OTHER = "the weights are being replaced by another call: send it again once that has ended"
_ORDERED = "another call is being carried out: send it again once that has ended"
_STARTED_AGAIN = "a replica was started again meanwhile and has the weights of before: send it again"
_RUNNING = "requests are being decoded: send it again once they have ended"


@dataclass(slots=True)
class _Asked:
    """victims: open requests that it ends; None: it has not begun."""

    ask: Ask
    victims: tuple[str, ...] | None = None


@dataclass(slots=True)
class Control:
    """Carries out what is asked, each thing once it can be.

    open_ids: of requests that have been taken and have not ended. in_force: a file that says which weights replaced
    those of the start, for a replica that is started again; None: nobody starts this one again.
    """

    core: EngineCore
    engine: CountedEngine
    open_ids: Callable[[], tuple[str, ...]]
    in_force: Path | None = None
    _waiting: list[_Asked] = field(default_factory=list)
    _told: list[Obeyed] = field(default_factory=list)
    _paused: Pause | None = None
    _ordered: str = ""  # the call whose order is about to be carried out
    _reader: str = ""  # the call that has read weights, and their folder
    _folder: str = ""

    def take(self, ask: Ask) -> None:
        self._waiting.append(_Asked(ask))

    def go_on(self) -> list[Obeyed]:
        """Begin what can begin, between two steps. Return what has been done."""
        if not (self._waiting or self._told):
            return []
        self._waiting = [asked for asked in self._waiting if not self._is_begun(asked)]
        self.core.hold(self._hold())
        told, self._told = self._told, []
        return told

    def catch_up(self) -> None:
        """Take the weights that other replicas have in force, before the first request. Raises EngineError where they
        are gone: this replica must not answer by older ones."""
        if self.in_force is None or not self.in_force.exists():
            return
        folder, version = json.loads(self.in_force.read_text(encoding="utf-8"))
        self.core.hold("requests")
        problems: list[str | None] = []
        for order in (ReadWeights(folder), PutWeights(version)):
            self.core.order(order, problems.append)
            while not problems:
                self.core.step()
            if problem := problems.pop():
                raise EngineError(f"the weights that replaced those of the start cannot be read again: {problem}")
        self.core.hold("")

    def _hold(self) -> Hold:
        if self._paused is not None and self._paused.mode == "in_place":
            return "passes"
        is_waiting = any(not isinstance(asked.ask.what, ForgetKV) for asked in self._waiting)
        wants_quiet = self._paused or is_waiting or self._ordered or self._reader or self.engine.released
        return "requests" if wants_quiet else ""

    def _is_begun(self, asked: _Asked) -> bool:
        """Begin it if it can be. Return whether it waits no more."""
        ask = asked.ask
        if isinstance(ask.what, Continue):
            self._paused = None
            return self._tell(ask)
        if isinstance(ask.what, Pause):
            return self._is_paused(asked, ask.what)
        return self._is_ordered(asked, ask.what)

    def _is_paused(self, asked: _Asked, pause: Pause) -> bool:
        if asked.victims is None:
            self._paused = pause
            asked.victims = self._abort_all() if pause.mode == "abort" else ()
        if self._paused is not pause:
            return self._tell(asked.ask, "another call has continued, or paused in another mode", BUSY)
        is_open = set(asked.victims) & set(self.open_ids())
        is_done = not self.core.has_pass if pause.mode == "in_place" else not is_open and not self.core.is_decoding
        return is_done and self._tell(asked.ask)

    def _is_ordered(self, asked: _Asked, order: Order) -> bool:
        ask = asked.ask
        if isinstance(order, (PutWeights, DropWeights)):
            return self._begin(ask, order) if self._reader == ask.key else self._tell(ask, _STARTED_AGAIN, 503)
        if self._reader or self._ordered:
            return self._tell(ask, _OTHER if self._reader else _ORDERED, BUSY)
        if asked.victims is None:
            asked.victims = self._abort_all() if ask.is_aborting else ()
        if not self.core.is_decoding:
            return self._begin(ask, order)
        if isinstance(order, ForgetKV):
            return self._tell(ask, _RUNNING)
        if self._paused is not None and self._paused.mode == "in_place" and not asked.victims:
            return self._tell(ask, _AMID, BUSY)
        return False

    def _begin(self, ask: Ask, order: Order) -> bool:
        self._ordered = ask.key
        self.core.order(order, partial(self._end, ask, order))
        return True

    def _end(self, ask: Ask, order: Order, problem: str | None) -> None:
        self._ordered = ""
        if isinstance(order, ReadWeights) and problem is None:
            self._reader, self._folder = ask.key, str(order.source)
        elif isinstance(order, (PutWeights, DropWeights)):
            self._reader = ""
        if isinstance(order, PutWeights) and problem is None and self.in_force is not None:
            partial_file = self.in_force.with_suffix(f".{ask.key}")
            partial_file.write_text(json.dumps([self._folder, self.engine.weight_version]), encoding="utf-8")
            partial_file.replace(self.in_force)
        self._tell(ask, problem)

    def _abort_all(self) -> tuple[str, ...]:
        victims = self.open_ids()
        for request_id in victims:
            self.core.abort(request_id)
        return victims

    def _tell(self, ask: Ask, problem: str | None = None, status: int = 400) -> bool:
        self._told.append(Obeyed(ask.key, problem, status, self.engine.weight_version))
        return True
