"""The relay in shared memory: every message once and in order, nothing unread overwritten, a writer that is gone."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.decoding import Command
from common.errors import LOST_PEER, EngineError
from common.processes import shared_relay
from common.processes.shared_relay import NUM_SLOTS, SLOT_BYTES, SharedRelay
from tests.clock import Clock

ROOT = Path(__file__).parents[3]
LONG = Command(aborted=("x" * SLOT_BYTES,))


class Far:
    """Stands for gloo: what rank 0 hands in comes out on the others."""

    def __init__(self) -> None:
        self.sent: list[Command] = []

    def exchange(self, command: Command, step: int) -> Command:
        if command != Command():
            self.sent.append(command)
        return self.sent[-1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The relay's, so that it waits for as long as a test says and not as the machine is busy."""
    clock = Clock()
    monkeypatch.setattr(shared_relay, "time", clock)
    return clock


Relays = Callable[..., list[SharedRelay]]


@pytest.fixture
def relays() -> Relays:
    def build(
        num_ranks: int = 2, *, timeout_s: float = 60.0, peers: tuple[int, ...] = (), far: Any = None
    ) -> list[Any]:
        memory = mmap.mmap(-1, NUM_SLOTS * SLOT_BYTES + mmap.PAGESIZE)
        return [
            SharedRelay(memory, place, num_ranks, 10 + place, peers, timeout_s, far or Far())
            for place in range(num_ranks)
        ]

    return build


def test_every_rank_gets_every_command_in_order(relays: Relays) -> None:
    """More of them than there are slots, some too long for one."""
    far = Far()
    writer, *readers = relays(3, far=far)
    commands = [LONG if n % 300 == 7 else Command(digest=n) for n in range(3 * NUM_SLOTS)]
    received: list[list[Command]] = [[] for _ in readers]

    def read(reader: SharedRelay, into: list[Command]) -> None:
        for step in range(len(commands)):
            into.append(reader.exchange(Command(), step))

    threads = [threading.Thread(target=read, args=pair, daemon=True) for pair in zip(readers, received, strict=True)]
    for thread in threads:
        thread.start()
    assert [writer.exchange(command, step) for step, command in enumerate(commands)] == commands
    for thread in threads:
        thread.join(60)
    assert received == [commands, commands] and set(far.sent) == {LONG}


def test_what_a_rank_has_not_read_is_not_overwritten(relays: Relays, clock: Clock) -> None:
    writer, reader = relays()
    for step in range(NUM_SLOTS):
        writer.exchange(Command(digest=step), step)
    with pytest.raises(EngineError, match=f"rank 10, step 777: {LOST_PEER}"):
        writer.exchange(Command(), 777)
    assert reader.exchange(Command(), 0) == Command(digest=0)


def test_a_message_is_taken_when_all_of_it_is_there(relays: Relays, clock: Clock) -> None:
    writer, reader = relays()
    writer.exchange(Command(digest=5), 0)
    at = SLOT_BYTES + SLOT_BYTES // 2  # behind the message: no part of it
    writer._bytes[at] = 1
    checksum = writer._words[SLOT_BYTES // 8 + 2]
    writer._words[SLOT_BYTES // 8 + 2] = checksum ^ 1
    with pytest.raises(EngineError, match=LOST_PEER):
        reader.exchange(Command(), 0)
    reader._number = 0
    writer._words[SLOT_BYTES // 8 + 2] = checksum
    assert reader.exchange(Command(), 0) == Command(digest=5)


@pytest.fixture
def ended() -> int:
    """A process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_writer_that_is_gone_ends_the_wait(relays: Relays, ended: int, clock: Clock) -> None:
    _, reader = relays(timeout_s=600.0, peers=(ended,))
    with pytest.raises(EngineError, match=f"rank 11, step 3: {LOST_PEER} .nothing heard for 0[.]2 s"):
        reader.exchange(Command(), 3)


def test_a_reader_that_is_gone_is_noticed_by_the_next_messages(relays: Relays, ended: int, clock: Clock) -> None:
    writer, _ = relays(timeout_s=600.0, peers=(ended,))
    writer.exchange(Command(), 0)
    clock.sleep(1)
    with pytest.raises(EngineError, match=f"rank 10, step 1: {LOST_PEER}"):
        writer.exchange(Command(), 1)


def test_a_reader_that_has_stopped_is_noticed_before_the_ring_is_full(relays: Relays, clock: Clock) -> None:
    writer, reader, _ = relays(3, timeout_s=20.0)
    with pytest.raises(EngineError, match=f"rank 10, step [0-9]+: {LOST_PEER}"):
        for step in range(NUM_SLOTS):
            clock.sleep(1)
            writer.exchange(Command(), step)
            reader.exchange(Command(), step)
    assert 18 < step < 22


def test_the_last_word_of_a_writer_that_has_ended_is_heard(relays: Relays, ended: int, clock: Clock) -> None:
    """It arrives after the reader's look at the ring and before its look for the process."""
    writer, reader = relays(peers=(ended,))
    writer.exchange(Command(is_over=True), 0)
    arrived, too_early = reader._arrived, iter([False, False])

    def late(found: list[bytes | None]) -> bool:
        if next(too_early, True):
            return arrived(found)
        clock.sleep(1)  # so that it is time to look for the process
        return False

    reader._arrived = late  # type: ignore[method-assign]
    assert reader.exchange(Command(), 0) == Command(is_over=True)


WORKER = """
import os
import sys
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from common.decoding import Command
from common.processes import shared_relay
from common.processes.relay import ReplicaRelay
rank, store, is_blind = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "blind"
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2, timeout=timedelta(seconds=200))
shared_relay.FOLDER = Path(sys.argv[4])
if is_blind and rank == 1:
    shared_relay._open = lambda path: None
far = ReplicaRelay(dist.group.WORLD, rank, is_first=rank == 0)
relay = shared_relay.share_memory(dist.group.WORLD, rank, rank, 2, 200.0, far)
given = [Command(digest=n) if n != 5 else Command(aborted=("y" * 9000,)) for n in range(600)]
found = [(relay or far).exchange(given[n] if rank == 0 else Command(), n) for n in range(600)]
assert found == given
print(type(relay).__name__, flush=True)
dist.barrier()
os._exit(0)  # gloo's threads abort a process that ends before its peer
"""


@pytest.mark.parametrize(("sight", "kind"), [("clear", "SharedRelay"), ("blind", "NoneType")])
def test_ranks_share_memory_where_all_can_and_leave_no_file(tmp_path: Path, sight: str, kind: str) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(tmp_path / "store"), sight, str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert [out.strip() for out, _ in told] == [kind, kind]
    assert not list(folder.iterdir())
