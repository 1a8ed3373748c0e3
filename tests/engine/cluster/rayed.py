"""A Ray cluster of this process, with fake devices, and the processes that it has started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WAIT_S = 600.0  # on a busy machine
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install -e '.[ray]'")


@contextmanager
def a_cluster() -> Iterator[str]:
    """Start one of this machine; its address. Two of four processors are there whatever the machine has."""
    import ray

    context = ray.init(
        address="local",
        num_cpus=4,
        num_gpus=2,
        resources={"NPU": 4},
        object_store_memory=2**27,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


def wait_for(condition: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def kill_one(named: str) -> int:
    """Kill with -9 one of the processes that this one has started, by a part of its command line; its id."""
    found = processes(named)
    assert found, f"no process {named}"
    os.kill(found[0], signal.SIGKILL)
    return found[0]


def processes(named: str) -> list[int]:
    """Ids of the descendants of this process whose command line has this part, in ascending order."""
    found = {int(entry.name): _read(entry) for entry in Path("/proc").iterdir() if entry.name.isdecimal()}
    return sorted(pid for pid, (_, line) in found.items() if named in line and _is_below(pid, found))


def _read(entry: Path) -> tuple[int, str]:
    """The parent's id and the command line; of a process that has just ended nothing."""
    try:
        parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        return parent, (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return 0, ""


def _is_below(pid: int, found: Mapping[int, tuple[int, str]]) -> bool:
    while pid > 1:
        pid = found.get(pid, (0, ""))[0]
        if pid == os.getpid():
            return True
    return False
