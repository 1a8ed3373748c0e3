"""Launchers of several nodes that watch each other through the rendezvous store."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

from common.errors import LOST_PEER

_FAILED_KEY = "lopa/failed"
_DONE_KEY = "lopa/done"
_BEAT_S = 1.0
_CAUSE_S = 1.5  # within which every node that failed has told so
_POLL_S = 0.1
_SILENCE_S = 15.0  # a node that has not been heard of for so long is gone
_LINGER_S = 2.5  # node 0 holds the store: it stays until the others have read why it ends


class NodeWatch(threading.Thread):
    """One in each node's launcher: beats in the rendezvous store; ends this node when another fails or falls silent."""

    def __init__(self, node: int, num_nodes: int, address: str, port: int) -> None:
        super().__init__(daemon=True)
        self.reason: str | None = None
        self._node, self._num_nodes = node, num_nodes
        self._address, self._port = address, port
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            self._watch(self._connect(timeout_s=600.0))
        except RuntimeError:
            # The store is gone with node 0. At the regular end this launcher ends a moment later.
            self._stop("the first node has ended", patience_s=3.0)

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
            if store.check([_FAILED_KEY]):
                return self._stop(self._first_cause(store) or "another node has failed")
            for node in others:
                beat = store.add(f"lopa/beat/{node}", 0)
                # No beat yet: the rendezvous waits for this node.
                if beat != last_beat[node] or beat == 0 or store.check([f"{_DONE_KEY}/{node}"]):
                    last_beat[node], heard_at[node] = beat, time.monotonic()
                elif time.monotonic() - heard_at[node] > _SILENCE_S:
                    return self._stop(f"node {node} has not been heard of for {_SILENCE_S:.0f} s", patience_s=3.0)
        return None

    def _stop(self, reason: str, patience_s: float = 0.0) -> None:
        if not self._ended.wait(patience_s) if patience_s else not self._ended.is_set():
            self.reason = reason
            os.kill(os.getpid(), signal.SIGTERM)
