"""An engine's ends of its links to all front ends, as one link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.serving.link import Link, wait_for_any
from common.serving.messages import (
    TAKEN_ID,
    Abort,
    AbortCall,
    Aborted,
    Add,
    Counts,
    Ended,
    Over,
    Passed,
    Rejected,
    call_names,
)


class Links:
    """common.serving.link.Link over several: what becomes of a request is told to the front end that sent it, what is
    about the engine to all. It is over once all of them have said so; a call can be aborted from any of them."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._open = [*links]
        self._link_of: dict[str, Link] = {}  # of requests that have not ended
        self._late: dict[Link, Counts] = {}  # the newest, for those that are behind

    def send(self, messages: Sequence[Any]) -> None:
        """Send what the sockets take; to a front end that is behind, the counts only once it has caught up. Raises
        LinkClosed."""
        wanted_by = [self._link_of.get(request_id) if (request_id := _request_of(m)) else None for m in messages]
        for link in self._open:
            own = [m for m, wanted in zip(messages, wanted_by, strict=True) if wanted in (None, link)]
            link.send(self._in_time(link, own))
        for message in messages:
            if isinstance(message, (Ended, Rejected)):
                self._link_of.pop(message.id, None)

    def send_last(self, messages: Sequence[Any], seconds: float) -> None:
        """Tell all of them before this process ends, each within so many seconds."""
        for link in self._open:
            link.send_last(messages, seconds)

    def is_behind(self, request_id: str) -> bool:
        """Whether the front end of a request reads much more slowly than it is written to, or has stopped."""
        link = self._link_of.get(request_id)
        return link is not None and link.is_behind

    def receive(self, wait_s: float = 0.0) -> list[Any]:
        """Return what has come, after waiting for something up to so long. Raises LinkClosed."""
        if wait_s:
            wait_for_any(self._open, wait_s)
        return [one for link in [*self._open] for message in link.receive() for one in self._asked(link, message)]

    def _in_time(self, link: Link, messages: list[Any]) -> list[Any]:
        """Return what a front end is told now: counts add nothing to what already waits for it."""
        late = [self._late.pop(link)] if link in self._late else []
        if not link.is_behind:
            return late + messages
        late += [message for message in messages if isinstance(message, Counts)]
        if late:
            self._late[link] = late[-1]
        return [message for message in messages if not isinstance(message, Counts)]

    def _asked(self, link: Link, message: Any) -> list[Any]:
        """Return what a front end's message asks of the engine."""
        if isinstance(message, Add):
            request_id = message.request.id
            if request_id in self._link_of:
                link.send([Rejected(request_id, TAKEN_ID)])
                return []
            self._link_of[request_id] = link
        elif isinstance(message, AbortCall):
            called = [one for one in self._link_of if message.call_id is None or message.call_id in call_names(one)]
            link.send([Aborted(message.number, len(called))])
            return [Abort(one) for one in called]
        elif isinstance(message, Over):
            self._open.remove(link)
            return [Abort(one) for one, own in self._link_of.items() if own is link] if self._open else [message]
        return [message]


def _request_of(message: Any) -> str | None:
    """Return the id of the request that a message is about; None: it is about the engine."""
    return message.record.request_id if isinstance(message, Passed) else getattr(message, "id", None)
