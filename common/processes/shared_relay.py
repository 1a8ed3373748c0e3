"""The relay of ranks on one host: a ring of messages in shared memory, which costs rank 0 no system call a step.

Rank 0 of the replica writes message n into slot n of the ring; the others look at the slot until n stands there, and
note how far they have read, so that nothing unread is overwritten. A message carries a checksum, since another
processor may see its parts arrive in any order. What is too long for a slot travels by gloo behind an empty message.

    slot: number, length, checksum (int64 each), payload        behind the slots: how far each rank has read (int64)
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.decoding import Command
from common.errors import LOST_PEER, EngineError
from common.processes.relay import ReplicaRelay

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FOLDER = Path("/dev/shm")  # memory that has a name
NUM_SLOTS, SLOT_BYTES = 256, 4096
_WORD = 8
_HEAD_WORDS = 3
_ROOM = SLOT_BYTES - _HEAD_WORDS * _WORD
_TOO_LONG = _ROOM + 1  # as a length: the message comes by gloo
_SPIN_S = 1e-4  # looking without a pause
_LEAST_NAP_S, _MOST_NAP_S = 5e-5, 5e-3  # between looks: a twentieth of what has been waited
_LOOK_S = 0.2  # between looks for the other processes


class SharedRelay:
    """common.decoding.Relay over memory that all ranks of the replica have mapped. place: among them, 0 writes."""

    def __init__(
        self, memory: mmap.mmap, place: int, num_ranks: int, rank: int, peers: Sequence[int], timeout_s: float,
        inner: ReplicaRelay,
    ) -> None:  # fmt: skip
        """rank: as messages name it. peers: the other processes. inner: for what is too long."""
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("q")
        behind = NUM_SLOTS * SLOT_BYTES // _WORD
        self._read_words, self._own_word = slice(behind + 1, behind + num_ranks), behind + place
        self._place = place
        self._rank = rank
        self._peers = peers
        self._timeout_s = timeout_s
        self._inner = inner
        self._number = 0
        self._slowest, self._since = 0, time.perf_counter()  # how far the slowest rank has read, and since when
        self._looked = self._since

    def exchange(self, command: Command, step: int) -> Command:
        """Rank 0's command on every rank. Raises EngineError if one is gone."""
        self._number += 1
        return self._write(command, step) if self._place == 0 else self._read(step)

    def _write(self, command: Command, step: int) -> Command:
        self._look_for_readers(step)
        self._wait(lambda: self._number_read() > self._number - NUM_SLOTS - 1, step)
        message = pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL)
        is_short = len(message) <= _ROOM
        first, payload = self._slot(), message if is_short else b""
        length = len(message) if is_short else _TOO_LONG
        at = first * _WORD + _HEAD_WORDS * _WORD
        self._bytes[at : at + len(payload)] = payload
        self._words[first + 1] = length
        self._words[first + 2] = _checksum(self._number, length, payload)
        self._words[first] = self._number
        return command if is_short else self._inner.exchange(command, step)

    def _read(self, step: int) -> Command:
        found: list[bytes | None] = []
        self._wait(lambda: self._arrived(found), step)
        self._words[self._own_word] = self._number
        (message,) = found
        if message is None:
            return self._inner.exchange(Command(), step)
        command: Command = pickle.loads(message)
        return command

    def _arrived(self, found: list[bytes | None]) -> bool:
        """Whether this number's message is whole; it is then in `found`, None for one that comes by gloo."""
        first = self._slot()
        if self._words[first] != self._number:
            return False
        length, at = self._words[first + 1], first * _WORD + _HEAD_WORDS * _WORD
        message = bytes(self._bytes[at : at + length]) if 0 <= length <= _ROOM else b""
        if self._words[first + 2] != _checksum(self._number, length, message):
            return False
        found.append(None if length == _TOO_LONG else message)
        return True

    def _number_read(self) -> int:
        """By the slowest of the others."""
        return min(self._words[self._read_words])

    def _look_for_readers(self, step: int) -> None:
        """Now and then: a rank that is gone, or has stopped reading, would else be missed until the ring is full."""
        now = time.perf_counter()
        if now - self._looked < _LOOK_S:
            return
        self._looked, slowest = now, self._number_read()
        if slowest != self._slowest or slowest == self._number - 1:
            self._slowest, self._since = slowest, now
        if now - self._since > self._timeout_s or not all(map(_is_alive, self._peers)):
            raise self._lost(step, now - self._since)

    def _lost(self, step: int, waited_s: float) -> EngineError:
        return EngineError(f"rank {self._rank}, step {step}: {LOST_PEER} (nothing heard for {waited_s:.1f} s)")

    def _slot(self) -> int:
        """The first word of this number's slot."""
        return self._number % NUM_SLOTS * (SLOT_BYTES // _WORD)

    def _wait(self, is_there: Callable[[], bool], step: int) -> None:
        if is_there():
            return
        began = looked = time.perf_counter()
        while not is_there():
            now = time.perf_counter()
            if now - looked > _LOOK_S:
                looked = now
                is_lost = now - began > self._timeout_s or not all(map(_is_alive, self._peers))
                if is_lost:
                    if is_there():  # it may have said its last word and ended
                        return
                    raise self._lost(step, now - began)
            nap_s = min(_MOST_NAP_S, max(_LEAST_NAP_S, (now - began) / 20))
            time.sleep(0 if now - began < _SPIN_S else nap_s)


def share_memory(
    group: ProcessGroup, rank: int, place: int, num_ranks: int, timeout_s: float, inner: ReplicaRelay
) -> SharedRelay | None:
    """The shared relay where all ranks of the group can map one memory; None, on all of them, where they cannot."""
    import torch.distributed as dist

    memory, own_path = _create() if place == 0 else (None, "")
    try:
        told: list[Any] = [own_path]
        dist.broadcast_object_list(told, group=group, group_src=0)
        if place and told[0]:
            memory = _open(told[0])
        found: list[Any] = [None] * num_ranks
        dist.all_gather_object(found, (memory is not None, os.getpid(), _process_numbers()), group=group)
    finally:
        if own_path:
            Path(own_path).unlink(missing_ok=True)  # it lives on where it is mapped, and ends with the processes
    has_memory, processes, numbers = zip(*found, strict=True)
    if memory is None or not all(has_memory) or len(set(numbers)) > 1:
        return None
    peers = [process for other, process in enumerate(processes) if other != place]
    return SharedRelay(memory, place, num_ranks, rank, peers, timeout_s, inner)


def _process_numbers() -> int:
    """In which of the kernel's tables this process has its number: containers may share memory, but not that."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _size() -> int:
    return NUM_SLOTS * SLOT_BYTES + mmap.PAGESIZE


def _create() -> tuple[mmap.mmap | None, str]:
    """Zeros, and the file that names them; no memory and no name where there is none to share."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="lopa-", dir=FOLDER)
    except OSError:
        return None, ""
    try:
        os.posix_fallocate(descriptor, 0, _size())
        return mmap.mmap(descriptor, _size()), path
    except OSError:
        Path(path).unlink(missing_ok=True)
        return None, ""
    finally:
        os.close(descriptor)


def _open(path: str) -> mmap.mmap | None:
    try:
        with Path(path).open("r+b") as file:
            return mmap.mmap(file.fileno(), _size())
    except (OSError, ValueError):
        return None


def _checksum(number: int, length: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(number.to_bytes(_WORD, "little") + length.to_bytes(_WORD, "little")))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
