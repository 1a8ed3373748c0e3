"""Clients that mean harm, or do it all the same: bodies of wrong types, silent connections, readers that do not read.

python -m tests.engine.serving.floods 20 2000    seconds, silent connections: what others see of it, as JSON
python -m tests.engine.serving.floods 20 2000 dear    and chunks of a byte, requests in a row, thousands of headers
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from tests.engine.serving.served import QUESTION, Served
from tests.engine.serving.storms import children_of, resident_kib

_ROOM = 2_000_000  # bytes of a body
_MANY = {"id": 1_000_000, "float": 500_000, "object": 600_000}


# Chunks of a byte, requests that do not wait for answers, thousands of headers.
_HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
DEAR = [
    (_HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 10_000),
    (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2_000),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"a: b\r\n" * 500),
]


def wrong_bodies() -> list[tuple[str, bytes]]:
    """Route and body: some 2 MB that fit no field."""
    ids, floats = [1] * _MANY["id"], [1.0] * _MANY["float"]
    texts = [{"type": "text", "text": 1}] * 60_000
    made: list[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": ["a", *ids]}),
        ("/v1/completions", {"prompt": floats}),
        ("/v1/completions", {"prompt": floats[:100_000]}),
        ("/v1/completions", {"prompt": [*ids[:500_000], "a"]}),
        ("/v1/completions", {"prompt": "a", "stop": ids}),
        ("/v1/completions", {"prompt": "a", "stop": ids[:400_000]}),
        ("/v1/completions", {"prompt": "a", "n": int("9" * 4300)}),
        ("/v1/completions", {"prompt": "a", **{f"k{number}": 1 for number in range(150_000)}}),
        ("/v1/completions", {"prompt": "a", "diffusion": {f"k{number}": 1 for number in range(100_000)}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ids}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ids[:400_000]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": texts}]}),
        ("/v1/chat/completions", {"messages": [{}] * _MANY["object"]}),
        ("/v1/chat/completions", {"messages": [{}] * 100_000}),
        ("/tokenize", {"prompt": ids[:500_000]}),
        ("/tokenize", {"prompt": "ab\n" * (_ROOM // 4)}),
        ("/detokenize", {"tokens": floats}),
    ]  # fmt: skip
    return [(route, json.dumps(body).encode()) for route, body in made]


def watch(port: int) -> dict[str, Any]:
    """Ask /health again and again, and read streams, until standard input ends; the longest waits.

    In a process of its own, whose threads wait for nobody else. Pauses are those between two parts of a stream.
    """
    is_over, statuses, longest = threading.Event(), Counter[int](), {"health": 0.0, "pause": 0.0}

    def ask() -> None:
        while not is_over.wait(0.05):
            began = time.monotonic()
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/health")
            statuses[connection.getresponse().status] += 1
            longest["health"] = max(longest["health"], time.monotonic() - began)
            connection.close()

    def read() -> None:
        while not is_over.is_set():
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            body = {"prompt": QUESTION.format(7), "max_tokens": 192, "ignore_eos": True, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            statuses[answer.status] += 1
            last = None
            while answer.readline():
                now = time.monotonic()
                longest["pause"] = max(longest["pause"], now - (last or now))
                last = now
            connection.close()

    threads = [threading.Thread(target=ask), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    is_over.set()
    for thread in threads:
        thread.join()
    return {"statuses": dict(statuses), **{f"longest {name} s": round(value, 3) for name, value in longest.items()}}


@contextmanager
def watched(server: Served) -> Iterator[dict[str, Any]]:
    """What `watch` has seen meanwhile is in the dict at the end."""
    command = [sys.executable, "-m", "tests.engine.serving.floods", "watch", str(server.port)]
    seen: dict[str, Any] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield seen
        seen.update(json.loads(process.communicate(timeout=120)[0]))


class Flood:
    """Senders of one flood, a method each, until the deadline; and what they saw."""

    def __init__(self, server: Served, seconds: float, num_silent: int) -> None:
        self.statuses, self.longest_s, self.silent = Counter[int](), 0.0, list[socket.socket]()
        self._server, self._num_silent, self._bodies = server, num_silent, wrong_bodies()
        (self._front_end,) = children_of(server.process.pid)
        self.before_kib = self.most_kib = resident_kib(self._front_end)
        self._deadline = time.monotonic() + seconds

    def send(self, first: int) -> None:
        """Wrong bodies, one after another."""
        place = first
        while time.monotonic() < self._deadline:
            route, body = self._bodies[place % len(self._bodies)]
            began = time.monotonic()
            try:
                status = self._server.send("POST", route, body)[0]
            except (OSError, HTTPException):
                status = -1
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.statuses[status] += 1
            place += 1

    def measure(self) -> None:
        """The front end's memory."""
        while time.monotonic() < self._deadline:
            self.most_kib = max(self.most_kib, resident_kib(self._front_end))
            time.sleep(0.05)

    def connect(self) -> None:
        """Connections that say nothing."""
        for _ in range(self._num_silent):
            self.silent.append(socket.create_connection(("127.0.0.1", self._server.port), timeout=60))

    def write(self, head: bytes, part: bytes) -> None:
        """Parts that are dear to read, until the server has enough of them; answers are not read."""
        while time.monotonic() < self._deadline:
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", self._server.port), timeout=10) as connection,
            ):
                connection.sendall(head)
                for _ in range(100):
                    connection.sendall(part)

    def close(self) -> None:
        for connection in self.silent:
            connection.close()


def flood(server: Served, seconds: float, num_silent: int, dear: Sequence[tuple[bytes, bytes]] = ()) -> dict[str, Any]:
    """Send wrong bodies from several threads while silent connections come; what others saw, and what it took.

    dear: of `DEAR`, sent besides.
    """
    with watched(server) as quiet:
        time.sleep(min(5.0, seconds))
    log_before, sent = len(server.text), Flood(server, seconds, num_silent)
    tasks: list[Callable[[], None]] = [sent.measure, sent.connect, *[partial(sent.send, 4 * n) for n in range(4)]]
    tasks += [partial(sent.write, *wrong) for wrong in dear]
    with watched(server) as seen:
        threads = [threading.Thread(target=task) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 60)
            assert not thread.is_alive(), "a sender hangs"
    sent.close()
    return {
        "wrong bodies": dict(sent.statuses), "longest refusal s": round(sent.longest_s, 3),
        "silent connections": len(sent.silent),
        "others": seen, "others before": quiet,
        "front end MiB": sent.before_kib // 1024, "grown by MiB": (sent.most_kib - sent.before_kib) // 1024,
        "log bytes": len(server.text) - log_before,
    }  # fmt: skip


# Comments come beside what passes bring: pauses are those of the front end, however slow the machine's passes are.
OFTEN_ALIVE = ("--set", "serve.keep_alive_s=0.1")


def main() -> None:
    if sys.argv[1] == "watch":
        print(json.dumps(watch(int(sys.argv[2]))))
        return
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "log", *OFTEN_ALIVE) as server:
        print(
            json.dumps(
                flood(server, float(sys.argv[1]), int(sys.argv[2]), DEAR if len(sys.argv) > 3 else ()), indent=1
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
