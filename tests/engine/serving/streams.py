"""Clients that stream answers, and the processes of a server's replicas."""

from __future__ import annotations

import json
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

from tests.engine.serving.served import WAIT_S, Served


def pid_of(served: Served, replica: int) -> int:
    """The process of a replica, or its launcher."""
    children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
    told = {int(child): Path(f"/proc/{child}/environ").read_bytes().split(b"\0") for child in children}
    return next(child for child, variables in told.items() if b"LOPA_REPLICA=%d" % replica in variables)


class Stream(threading.Thread):
    """A client that streams a completion, and what it got. is_whole: it has ended without an error."""

    def __init__(self, port: int, prompt: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.prompt = prompt
        self.text, self.error, self.has_begun, self.is_whole = "", "", False, False
        self.ended_at = 0.0
        self._port, self._max_tokens = port, max_tokens
        self.start()

    def run(self) -> None:
        body = {"prompt": self.prompt, "max_tokens": self._max_tokens, "ignore_eos": True, "stream": True}
        connection = HTTPConnection("127.0.0.1", self._port, timeout=WAIT_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                self.error = self.error or event.get("error", {}).get("message", "")
                self.text += "".join(choice["text"] for choice in event.get("choices", ()))
                self.has_begun = self.has_begun or bool(self.text)
            elif line.startswith(b"data: [DONE]"):
                self.is_whole = not self.error
        self.ended_at = time.monotonic()
        connection.close()
