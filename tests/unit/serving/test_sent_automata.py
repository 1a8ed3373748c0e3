"""Formats: compiled beside other requests, and sent over a connection once."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.constraints import Automaton
from common.decoding import GenerationRequest
from common.serving.http.engines.replica import Replica
from common.serving.http.service import Service
from common.serving.link import Link
from common.serving.messages import Abort, Add

LARGE = 2**15


class Writer:
    """A writer of a socket that counts."""

    def __init__(self, own: socket.socket) -> None:
        self._own = own
        self.lengths: list[int] = []

    def write(self, data: bytes) -> None:
        self.lengths.append(len(data))
        self._own.sendall(data)


def automaton(number: int) -> Automaton:
    class_V = np.full(LARGE, 1, np.int32)
    return Automaton(class_V, np.full((2, 2), number, np.int32), np.ones(2, np.bool_), 0, f"key {number}")


def connected() -> tuple[Replica, Writer, Link]:
    here, there = socket.socketpair()
    replica, writer = Replica(0), Writer(there)
    replica.begin(writer)  # type: ignore[arg-type]
    return replica, writer, Link(here)


def received(link: Link) -> list[Any]:
    while True:
        if found := link.receive(wait_s=5):
            return found


def test_it_is_sent_once_and_named_afterwards() -> None:
    replica, writer, link = connected()
    objects = []
    for place in range(3):
        replica.send([Abort("x"), Add(GenerationRequest(str(place), (1, 2), automaton=automaton(5)))])
        aborted, added = received(link)
        assert aborted == Abort("x") and added.request.id == str(place) and added.request.prompt == (1, 2)
        objects.append(added.request.automaton)
    assert objects[0] is objects[1] is objects[2] and objects[0].next_QC.tolist() == [[5, 5], [5, 5]]
    assert writer.lengths[0] > 4 * LARGE and max(writer.lengths[1:]) < 1000


def test_both_sides_forget_the_same_ones() -> None:
    replica, writer, link = connected()
    draws = random.Random(0)
    for _ in range(400):
        number = draws.randrange(96)
        given = None if number == 0 else automaton(number)
        replica.send([Add(GenerationRequest("a", (1,), automaton=given))])
        (added,) = received(link)
        assert (added.request.automaton is None) == (given is None)
        assert given is None or added.request.automaton.next_QC[0, 0] == number
    assert 96 < sum(length > LARGE for length in writer.lengths) < 300


def test_another_start_of_the_engine_is_sent_it_again() -> None:
    replica, _, link = connected()
    replica.send([Add(GenerationRequest("a", (1,), automaton=automaton(5)))])
    received(link)
    here, there = socket.socketpair()
    replica.end()
    replica.begin(Writer(there))  # type: ignore[arg-type]
    replica.send([Add(GenerationRequest("b", (1,), automaton=automaton(5)))])
    (added,) = received(Link(here))
    assert added.request.automaton.key == "key 5"


class Made(Exception):
    """The request's turn to be made has come."""


class Book:
    """Formats that take until `release`; but for `known`."""

    def __init__(self) -> None:
        self.release, self.prepared = threading.Event(), []  # type: ignore[var-annotated]

    def is_prepared(self, fields: Any) -> bool:
        return bool(fields.format == "known")

    def prepare(self, fields: Any) -> None:
        self.prepared.append(fields.format)
        self.release.wait()

    def orders(self, *_: Any) -> None:
        raise Made


def test_a_format_that_is_kept_waits_for_none_and_clients_that_leave_cost_nothing() -> None:
    service, book = Service.__new__(Service), Book()
    service._made = (None, book)  # type: ignore[assignment]
    service._compiling, service._compiler = asyncio.Lock(), ThreadPoolExecutor(1)

    def submitted(format: str) -> Any:
        fields: Any = SimpleNamespace(is_held=True, format=format)
        return service.submit("", fields, [()], None, "prefix")

    async def attack() -> None:
        hostile = [asyncio.create_task(submitted(f"hostile {number}")) for number in range(100)]
        await asyncio.sleep(0)
        with pytest.raises(Made):
            await submitted("known")
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)
        book.release.set()
        with pytest.raises(Made):
            await submitted("new")

    asyncio.run(asyncio.wait_for(attack(), 60))
    assert book.prepared in (["hostile 0", "new"], ["new"])
