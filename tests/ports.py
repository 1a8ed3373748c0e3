"""Ports for what cannot be told to listen on port 0 and say where it does."""

from __future__ import annotations

import random
import socket

_PORTS = range(10_000, 30_000)  # below those that Linux gives out by itself, so that nobody gets one in the meantime


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has taken yet."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port on 127.0.0.1")
