"""Batches of messages over a local socket, each as its length and its pickle. Trusts the other side, as ranks do."""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
from collections.abc import Sequence
from typing import Any

from common.serving.automata import SentAutomata

LENGTH_BYTES = 4
_BEHIND_BYTES = 4 * 2**20
_READ_BYTES = 2**18


def framed(messages: Sequence[Any], sent: SentAutomata | None = None) -> bytes:
    """Return messages as the bytes of one batch. sent: what the connection has brought before; None: messages that hold
    no automata."""
    body = pickle.dumps(list(messages), protocol=pickle.HIGHEST_PROTOCOL) if sent is None else sent.packed(messages)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def read_batch(reader: asyncio.StreamReader) -> list[Any]:
    """Return the messages of the next batch, which hold no automata. Raises IncompleteReadError at the end."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    messages: list[Any] = pickle.loads(await reader.readexactly(length))
    return messages


class LinkClosed(Exception):
    """The other side is gone."""


class Link:
    """The engine's end, which never waits for the other side: what the socket does not take stays here.

    Nothing is dropped: whoever sends looks at `is_behind` and sends less meanwhile.
    """

    def __init__(self, own: socket.socket) -> None:
        self._socket = own
        self._unsent = bytearray()
        self._unread = bytearray()
        self._sent_here = SentAutomata()
        own.setblocking(False)

    def send(self, messages: Sequence[Any]) -> None:
        """Send what the socket takes. Raises LinkClosed."""
        if messages:
            self._unsent += framed(messages)
        if not self._unsent:
            return
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            raise LinkClosed from None

    @property
    def is_behind(self) -> bool:
        """Whether the other side reads much more slowly than it is written to, or has stopped."""
        return len(self._unsent) > _BEHIND_BYTES

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self, wait_s: float = 0.0) -> list[Any]:
        """Return what has come, after waiting for something up to so long. Raises LinkClosed."""
        if wait_s:
            wait_for_any([self], wait_s)
        try:
            part = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            raise LinkClosed from None
        if not part:
            raise LinkClosed
        self._unread += part
        return self._whole_messages()

    def send_last(self, messages: Sequence[Any], seconds: float) -> None:
        """Wait for the other side to take all, up to so long each time, before this process ends."""
        self._unsent += framed(messages)
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(self._unsent)
        except OSError:
            return

    def _whole_messages(self) -> list[Any]:
        messages: list[Any] = []
        while len(self._unread) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._unread[:LENGTH_BYTES], "big")
            if len(self._unread) < end:
                break
            messages += self._sent_here.unpacked(bytes(self._unread[LENGTH_BYTES:end]))
            del self._unread[:end]
        return messages


def wait_for_any(links: Sequence[Link], wait_s: float) -> None:
    """Wait up to so long for something to read from one of them, or room for what is unsent. Raises LinkClosed."""
    waiting = select.poll()  # which takes descriptors of any number
    for link in links:
        waiting.register(link, select.POLLIN | (select.POLLOUT if link._unsent else 0))
    waiting.poll(1000 * wait_s)
    for link in links:
        link.send([])
