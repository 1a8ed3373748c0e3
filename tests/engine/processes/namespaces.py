"""Nodes with addresses of their own on one machine: network namespaces on a bridge that only they are on.

Nothing of the machine's own network is touched, and nothing leaves it: the bridge lies in a namespace, too.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

INTERFACE = "node0"
_TAG = "lopa-"


class Node:
    """address: its own, on the others' network."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address

    @property
    def inside(self) -> list[str]:
        """What starts a command in it."""
        return ["ip", "netns", "exec", self.name]

    def cut_off(self) -> None:
        """Take its link down, as a pulled cable does."""
        _ip("-n", self.name, "link", "set", INTERFACE, "down")

    def end_all(self) -> None:
        """Kill what still runs in it."""
        for pid in _ip("netns", "pids", self.name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def nodes(count: int) -> Iterator[list[Node]]:
    """Make so many nodes, removed at the end with all that runs in them. Skips where namespaces cannot be made."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    _remove_orphans()
    tag = f"{_TAG}{os.getpid()}-{secrets.token_hex(3)}"
    with ExitStack() as stack:
        switch = _namespace(f"{tag}-switch", stack)
        made = []
        try:
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for number in range(count):
                made.append(Node(_namespace(f"{tag}-{number}", stack), f"10.213.{number}.2"))
                stack.callback(made[-1].end_all)
                _plug(made[-1], switch, f"port{number}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield made


def _plug(node: Node, switch: str, port: str) -> None:
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", node.name)
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    _ip("-n", node.name, "addr", "add", f"{node.address}/16", "dev", INTERFACE)
    for interface in ("lo", INTERFACE):
        _ip("-n", node.name, "link", "set", interface, "up")


def _namespace(name: str, stack: ExitStack) -> str:
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    stack.callback(_remove, name)
    return name


def _remove_orphans() -> None:
    """Remove what a test has left that was killed with -9."""
    for path in Path("/run/netns").glob(f"{_TAG}*"):
        if not Path(f"/proc/{path.name.removeprefix(_TAG).partition('-')[0]}").exists():
            Node(path.name, "").end_all()
            _remove(path.name)


def _remove(name: str) -> None:
    with suppress(subprocess.CalledProcessError):
        _ip("netns", "del", name)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
