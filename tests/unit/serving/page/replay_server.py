"""A server for one page: it replays a recorded trace as the `denoise` stream, and refuses what it is told to refuse.

The prompt says what happens: `refuse 503` answers with that status, `break` ends the stream early, `fail` sends an
error in the stream, `slow` waits for `go` after the second event. Anything else is answered.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from common.serving.page import live_page

KEY = "secret"
WAIT_S = 60.0


class ReplayServer(ThreadingHTTPServer):
    """bodies: what was posted, in order. go: lets a slow stream go on. is_gone: a client has left a stream."""

    daemon_threads = True

    def __init__(self, trace: Mapping[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.trace = trace
        self._connections: list[socket.socket] = []
        self.bodies: list[dict[str, Any]] = []
        self.go = threading.Event()
        self.is_gone = threading.Event()
        self.wants_key = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def hang_up(self) -> None:
        """Hang up, also on connections that a browser has opened for later."""
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(trace: Mapping[str, Any]) -> Iterator[ReplayServer]:
    with ReplayServer(trace) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            server.hang_up()


class _Handler(BaseHTTPRequestHandler):
    server: ReplayServer

    def log_message(self, *_: object) -> None:
        """Nothing: the tests look at what was posted."""

    def do_GET(self) -> None:
        if self.path == "/":
            self._send(200, "text/html; charset=utf-8", live_page("m", {"num_lookahead": 3}).encode())
        else:
            self._send(404, "text/plain", b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        words = (body["prompt"] if "prompt" in body else body["messages"][0]["content"]).split()
        if self.server.wants_key and self.headers.get("Authorization") != f"Bearer {KEY}":
            self._refuse(401, "wrong or missing API key")
        elif words[0] == "refuse":
            self._refuse(int(words[1]), "the queue is full")
        else:
            self._stream(words[0])

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps({"error": {"message": message, "type": "", "param": None, "code": status}})
        self._send(status, "application/json", body.encode(), {"Retry-After": "3"} if status == 503 else {})

    def _stream(self, how: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for number, event in enumerate(self.server.trace["events"]):
                if number == 2 and how == "slow":
                    self.server.go.wait(WAIT_S)
                if number == 2 and how == "break":
                    return
                if number == 2 and how == "fail":
                    event = {"error": {"message": "out of memory"}}
                self._write(": keep-alive\n\n" + f"data: {json.dumps(event)}\n\n")
            answer = self.server.trace["answer"]
            tops = [[[-0.5, 7, " cat"], [-1.5, 8, "\n"]] for _ in range(answer["length"])]
            told = {"output_top_logprobs": tops}
            ids = [0] * answer["length"]
            last = {"text": answer["text"], "token_ids": ids, "meta_info": told, "finish_reason": "stop"}
            self._write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n")
        except OSError:
            self.server.is_gone.set()

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def _send(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
