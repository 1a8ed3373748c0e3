"""Launchers of several nodes that watch each other through the rendezvous store."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from typing import Any

from common.errors import LOST_PEER
from common.processes.nodes import Nodes

_FAILED_KEY = "lopa/failed"
_DONE_KEY = "lopa/done"
_WHO_KEY = "lopa/node"
_BEAT_S = 1.0
_CAUSE_S = 1.5  # within which every node that failed has told so
_POLL_S = 0.1
_SILENCE_S = 15.0  # a node that has not been heard of for so long is gone
_LINGER_S = 2.5  # node 0 holds the store: it stays until the others have read why it ends


class NodeWatch(threading.Thread):
    """One in each node's launcher: beats in the rendezvous store; ends this node when another fails or falls silent.

    num_here: ranks on each node. What is said of a node names its address and its ranks.
    """

    def __init__(self, nodes: Nodes, num_here: int) -> None:
        super().__init__(daemon=True)
        self.reason: str | None = None
        self._node, self._num_nodes, self._num_here = nodes.rank, nodes.count, num_here
        self._address, self._port = nodes.address, nodes.port
        self._ended = threading.Event()
        self._answered_at = 0.0  # when the store did last

    def run(self) -> None:
        try:
            store = self._connect(timeout_s=600.0)
            store.set(f"{_WHO_KEY}/{self._node}", _address_towards(self._address, self._port))
            self._answered_at = time.monotonic()
            threading.Thread(target=self._watch_store, daemon=True).start()
            self._watch(store)
        except RuntimeError:
            # The store is gone with node 0. At the regular end this launcher ends a moment later.
            self._stop(f"{self._named(0, self._address)} has ended", patience_s=3.0)

    def tell(self, problem: str | None) -> None:
        """Tell the others that this node has failed, or that it has finished and falls silent.

        From here on nothing that this watch sees may end its own process: that has its own end to tell of.
        """
        self._ended.set()
        try:
            store = self._connect(timeout_s=10.0)
            if problem is None:
                store.set(f"{_DONE_KEY}/{self._node}", "")
            else:
                store.set(f"{_FAILED_KEY}/{self._node}", f"node {self._node}: {problem}")
                store.set(_FAILED_KEY, "")
        except RuntimeError:
            return

    def cause(self, sentence: str) -> str:
        """Return what began it: this node's sentence, or if that only follows from a lost peer, what the peer's node
        tells."""
        if LOST_PEER not in sentence:
            return sentence
        with contextlib.suppress(RuntimeError):
            return self._first_cause(self._connect(timeout_s=10.0)) or sentence
        return sentence

    def linger(self) -> None:
        """The first node holds the store: it stays until the others have read why it ends."""
        if self._node == 0:
            time.sleep(_LINGER_S)

    def end(self) -> None:
        self._ended.set()

    def _first_cause(self, store: Any) -> str | None:
        """Return the first sentence of a node that does not follow from a lost peer; waits a moment for one."""
        told: list[str] = []
        deadline = time.monotonic() + _CAUSE_S
        while time.monotonic() < deadline:
            nodes = [node for node in range(self._num_nodes) if store.check([f"{_FAILED_KEY}/{node}"])]
            told = [store.get(f"{_FAILED_KEY}/{node}").decode() for node in nodes]
            cause = next((sentence for sentence in told if LOST_PEER not in sentence), None)
            if cause is not None:
                return cause
            time.sleep(_POLL_S)
        return told[0] if told else None

    def _connect(self, timeout_s: float) -> Any:
        import torch.distributed as dist

        timeout = timedelta(seconds=timeout_s)
        return dist.TCPStore(self._address, self._port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]

    def _watch(self, store: Any) -> None:
        others = [node for node in range(self._num_nodes) if node != self._node]
        last_beat = dict.fromkeys(others, 0)
        heard_at = dict.fromkeys(others, time.monotonic())
        while not self._ended.wait(_BEAT_S):
            store.add(f"lopa/beat/{self._node}", 1)
            self._answered_at = time.monotonic()
            if store.check([_FAILED_KEY]):
                return self._stop(self._first_cause(store) or "another node has failed")
            for node in others:
                beat = store.add(f"lopa/beat/{node}", 0)
                # No beat yet: the rendezvous waits for this node.
                if beat != last_beat[node] or beat == 0 or store.check([f"{_DONE_KEY}/{node}"]):
                    last_beat[node], heard_at[node] = beat, time.monotonic()
                elif time.monotonic() - heard_at[node] > _SILENCE_S:
                    return self._stop_silent(self._named(node, store.get(f"{_WHO_KEY}/{node}").decode()))
        return None

    def _watch_store(self) -> None:
        """End this node where the store, which the first node has, does not answer: calls to it have no deadline, and
        wait for minutes where the network between is cut."""
        while not self._ended.wait(_BEAT_S):
            if time.monotonic() - self._answered_at > _SILENCE_S:
                return self._stop_silent(self._named(0, self._address))
        return None

    def _named(self, node: int, address: str) -> str:
        """Return how a sentence names a node."""
        first, last = node * self._num_here, (node + 1) * self._num_here - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return f"node {node} ({address}, {ranks})"

    def _stop_silent(self, named: str) -> None:
        self._stop(f"{named} has not been heard of for {_SILENCE_S:.0f} s: it is off, or the network between is cut")

    def _stop(self, reason: str, patience_s: float = 0.0) -> None:
        if not self._ended.wait(patience_s) if patience_s else not self._ended.is_set():
            self.reason = reason
            os.kill(os.getpid(), signal.SIGTERM)


def _address_towards(address: str, port: int) -> str:
    """Return the address by which this node is known on the way to another; its host's name where there is no way."""
    with contextlib.suppress(OSError):
        family, kind, _, _, towards = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(towards)  # sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()
