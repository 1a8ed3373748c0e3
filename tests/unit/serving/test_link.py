"""Messages between the two processes."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from common.serving.engine.front import FrontEnd
from common.serving.link import Link, LinkClosed, framed
from common.serving.messages import Abort
from tests.descriptors import high_descriptor


def test_messages_come_whole_and_in_order_however_they_are_cut() -> None:
    here, there = socket.socketpair()
    link, data = Link(here), framed([Abort("a"), Abort("b")]) + framed([Abort("c")])
    found: list[Abort] = []
    for byte in data:
        there.sendall(bytes([byte]))
        found += link.receive()
    assert found == [Abort("a"), Abort("b"), Abort("c")]


def test_who_does_not_read_is_not_waited_for_and_misses_nothing() -> None:
    here, there = socket.socketpair()
    link, other = Link(here), Link(there)
    sent = [Abort(f"{n}" + "x" * 10_000) for n in range(100)]
    for message in sent:
        link.send([message])
    found: list[Abort] = []
    while len(found) < len(sent):
        link.send([])
        found += other.receive()
    assert found == sent


def test_an_other_side_that_is_gone_is_told_of() -> None:
    here, there = socket.socketpair()
    link = Link(here)
    there.close()
    with pytest.raises(LinkClosed):
        link.receive(wait_s=1)
    with pytest.raises(LinkClosed):
        link.send([Abort("a")])


def test_a_side_that_reads_nothing_is_behind_and_ends_nothing() -> None:
    here, there = socket.socketpair()
    link, other = Link(here), Link(there)
    sent = [Abort(f"{n}" + "x" * 2**20) for n in range(80)]
    assert not link.is_behind
    for message in sent:
        link.send([message])
    assert link.is_behind
    found: list[Abort] = []
    while len(found) < len(sent):
        link.send([])
        found += other.receive()
    assert found == sent and not link.is_behind


def test_a_link_may_have_any_descriptor() -> None:
    here, there = socket.socketpair()
    with high_descriptor(here) as own:
        there.sendall(framed([Abort("a")]))
        assert Link(own).receive(wait_s=60) == [Abort("a")]


@pytest.mark.parametrize(
    ("ends_by", "sentence"),
    [
        ("os.kill(os.getpid(), 9)", "the HTTP front end was killed by SIGKILL"),
        ("os._exit(3)", "the HTTP front end has ended with exit code 3; what it had to say is above"),
    ],
)
def test_a_front_end_that_is_gone_is_told_of_by_how_it_ended(ends_by: str, sentence: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", f"import os; {ends_by}"])
    process.wait()  # however long a busy machine takes
    assert FrontEnd(process, Link(socket.socketpair()[0])).why_gone() == sentence
