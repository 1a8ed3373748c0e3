"""Sockets with descriptors beyond those that `select.select` takes."""

from __future__ import annotations

import fcntl
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_LEAST = 1024


@contextmanager
def high_descriptor(one: socket.socket) -> Iterator[socket.socket]:
    """Give a copy of a socket with a descriptor from 1024 on; skips where no process may have so many."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] <= 2 * _LEAST:
        pytest.skip("no descriptor may be so high here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2 * _LEAST), before[1]))
    try:
        with socket.socket(fileno=fcntl.fcntl(one.fileno(), fcntl.F_DUPFD_CLOEXEC, _LEAST)) as copy:
            yield copy
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
