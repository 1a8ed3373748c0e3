"""The server under the soak, and what is looked at of its processes and of /metrics."""

from __future__ import annotations

import getpass
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.engine.serving.served import Served

READY_S = 300.0
OF_TORCH = f"torchinductor_{getpass.getuser()}"  # a cache of torch's in TMPDIR, which stays
_IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "lopa_requests_open", "vllm:kv_cache_usage_perc")


class Held(NamedTuple):
    """What processes hold: MiB resident, open handles, threads."""

    rss: float
    handles: int
    threads: int

    def __add__(self, other: object) -> Held:
        assert isinstance(other, Held)
        return Held(self.rss + other.rss, self.handles + other.handles, self.threads + other.threads)


NOTHING = Held(0.0, 0, 0)


class SoakedServer(Served):
    """`lopa serve demo` with replicas that come again after a kill, also where there is one."""

    def __init__(self, folder: Path, profile: str, num_replicas: int, environment: Mapping[str, str], *more: str):
        self.num_replicas = num_replicas
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        settings = {
            "mesh.data_parallel_size": num_replicas,
            # With two, a single replica is one that is looked after, too.
            "serve.num_front_ends": 1 if num_replicas > 1 else 2,
            "serve.engine_silence_s": 12,
            "max_num_requests": 8,
            "decode.num_lookahead": 1,
        }
        options = [item for name, value in settings.items() for item in ("--set", f"{name}={value}")]
        own = {**environment, "TMPDIR": str(self.temporary)}
        super().__init__(folder / "log", *options, *more, profile=profile, environment=own, start_new_session=True)

    def replicas(self) -> list[int]:
        """Their processes, by number; fewer while one is being started."""
        told = {_variable(pid, "LOPA_REPLICA"): pid for pid in children_of(self.process.pid)}
        return [told[str(number)] for number in range(self.num_replicas) if str(number) in told]

    def held(self) -> dict[str, Held]:
        """Return what is held, by part of the server."""
        replicas = self.replicas()
        found = {f"replica {number}": sum(map(held, tree_of(pid)), NOTHING) for number, pid in enumerate(replicas)}
        others = [pid for pid in children_of(self.process.pid) if pid not in replicas]
        return {"front end": sum(map(held, others), NOTHING), "launcher": held(self.process.pid), **found}

    def is_whole(self) -> bool:
        status, text = self.get("/ready")
        states = json.loads(text).get("replicas", ["ready"]) if status == 200 else []
        return bool(states) and set(states) == {"ready"}

    def wait_whole(self) -> None:
        self.wait_for(self.is_whole, "whole again", READY_S)

    def gauges(self) -> dict[str, float]:
        """What is 0 on an idle server, over all replicas."""
        text = self.get("/metrics")[1]
        return {name: sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))) for name in _IDLE}

    def wait_idle(self) -> None:
        self.wait_for(lambda: not any(self.gauges().values()), "idle", 60.0)

    def temporary_files(self) -> int:
        with suppress(OSError):
            return sum(1 for path in self.temporary.rglob("*") if OF_TORCH not in path.parts)
        return 0


def shared_memory() -> set[str]:
    """What lies in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def held(pid: int) -> Held:
    """Nothing, of a process that is gone."""
    with suppress(OSError, StopIteration, ValueError):
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        handles = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208  counted, not looked at
        return Held(int(status.get("VmRSS", "0 kB").split()[0]) / 1024, handles, int(status["Threads"]))
    return NOTHING


def children_of(pid: int) -> list[int]:
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def tree_of(pid: int) -> Iterator[int]:
    yield pid
    for child in children_of(pid):
        yield from tree_of(child)


def with_variable(name: str, value: str) -> list[int]:
    """All processes that were started with a variable of the environment."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if _variable(pid, name) == value]


def _variable(pid: int, name: str) -> str:
    with suppress(OSError):
        for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if one.startswith(name.encode() + b"="):
                return one.partition(b"=")[2].decode()
    return ""


def wait_until(condition: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())
