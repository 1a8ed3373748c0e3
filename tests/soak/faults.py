"""What is done to the server: one fault after another, each healed before the next.

A fault is a function of the stage that ends when it is healed; what it needs of the machine is a `needs_*` name.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from tests.engine.serving.floods import wrong_bodies
from tests.soak.asks import End, send_wrong
from tests.soak.load import Load
from tests.soak.machine import Clock, SmallDisk
from tests.soak.server import SoakedServer, wait_until

_DAY = 86_400


class Stage(NamedTuple):
    server: SoakedServer
    load: Load
    disk: SmallDisk
    clock: Clock
    rng: random.Random

    def victim(self) -> int:
        """The process of one of the replicas."""
        wait_until(lambda: len(self.server.replicas()) == self.server.num_replicas, 120)
        return self.rng.choice(self.server.replicas())


def nothing(stage: Stage) -> None:
    """Do nothing: what the other faults are compared with."""
    time.sleep(8)


def replica_killed(stage: Stage) -> None:
    _kill(stage, [stage.victim()])


def _kill(stage: Stage, pids: Sequence[int]) -> None:
    """Kill these, and wait until the server is no longer whole, which takes a moment to be seen."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not stage.server.is_whole(), 30)


def all_replicas_killed(stage: Stage) -> None:
    stage.victim()
    _kill(stage, stage.server.replicas())


def replica_stopped(stage: Stage) -> None:
    """Stop a replica for less than the silence that is noticed."""
    _stop(stage, stage.rng.uniform(2, 6))


def replica_silent(stage: Stage) -> None:
    """Stop a replica for longer: it counts as gone meanwhile."""
    _stop(stage, 16)


def _stop(stage: Stage, seconds: float) -> None:
    victim = stage.victim()
    os.kill(victim, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(victim, signal.SIGCONT)


def disk_full(stage: Stage) -> None:
    """No room for a word of the log, and for none of a replica that is started meanwhile."""
    with stage.disk.full():
        _kill(stage, [stage.victim()])
        time.sleep(12)


def disk_frozen(stage: Stage) -> None:
    """A log and temporary files that cannot be written to, as a replica dies; a word of the log waits, and all with
    it."""
    with stage.disk.frozen(stage.rng.uniform(3, 8)):
        os.kill(stage.victim(), signal.SIGKILL)


def clock_jumps(stage: Stage) -> None:
    """A day on, an hour back, and right again."""
    for seconds in (_DAY, -3600, 0):
        stage.clock.jump(seconds)
        time.sleep(4)


def bad_input(stage: Stage) -> None:
    """Wrong requests in a row, bodies of 2 MB that fit no field, noise, silent connections."""
    for _ in range(30):
        stage.load.add(send_wrong(stage.server.port, stage.rng), "bad input")
    for route, body in stage.rng.sample(wrong_bodies(), 4):
        began = time.monotonic()
        status, text = stage.server.send("POST", route, body)
        end = End("refused" if 400 <= status < 500 else "wrong", time.monotonic() - began, f"{status}: {text[:200]}")
        stage.load.add(end, "bad input")
    silent = []
    for _ in range(40):
        with suppress(OSError):
            silent.append(socket.create_connection(("127.0.0.1", stage.server.port), timeout=10))
            silent[-1].sendall(stage.rng.choice([b"", b"POST /v1/comp", stage.rng.randbytes(200)]))
    time.sleep(3)
    for connection in silent:
        connection.close()


class Fault(NamedTuple):
    name: str
    act: Callable[[Stage], None]
    why_not: str | None = None


def faults(disk: SmallDisk, num_replicas: int) -> Sequence[Fault]:
    """Return the faults in the order of their turns; those with a reason cannot be had here."""
    return (
        Fault("none", nothing),
        Fault("kill -9 of a replica", replica_killed),
        Fault("bad input", bad_input),
        Fault("a replica stopped for 2 to 6 s", replica_stopped),
        Fault("disk full as a replica dies", disk_full, disk.why_not),
        Fault("clock jumps", clock_jumps),
        Fault("a replica stopped for 16 s", replica_silent),
        Fault("disk frozen as a replica dies", disk_frozen, disk.why_not),
        Fault("kill -9 of all replicas", all_replicas_killed, None if num_replicas > 1 else "there is one replica"),
    )
