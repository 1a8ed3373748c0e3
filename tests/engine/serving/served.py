"""A server as its users start it, in a process of its own, and what tests ask of one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
QUESTION = "Tom has {} apples and buys 5 more. How many apples does he have now?"
WAIT_S = 240.0  # on a busy machine


def send(
    port: int, method: str, path: str, body: bytes | None = None, *, wait_s: float = WAIT_S, **headers: str
) -> tuple[int, str]:
    """Status and text of one request to a port of this machine."""
    connection = HTTPConnection("127.0.0.1", port, timeout=wait_s)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Served:
    """`lopa serve` of a model on a free port, as a context. arguments: of the command, after profile and run.

    launcher: the module that starts it, `common.commands.job` for several processes. environment: beside
    this process's own. how: of subprocess.Popen.
    """

    def __init__(
        self,
        log: Path,
        *arguments: str,
        model: str = "demo",
        profile: str = "cpu",
        launcher: str = "common.commands",
        environment: Mapping[str, str] | None = None,
        **how: Any,
    ) -> None:
        self.log = log
        self._how = how
        self._environment = environment or {}
        files = ["--profile", profile, model] if launcher == "common.commands" else [profile, model]
        self._command = [sys.executable, "-m", launcher, "serve", *files, "--port", "0", *arguments]
        self.port = 0

    def __enter__(self) -> Served:
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, **self._environment}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, env=environment, stderr=log, stdout=log, **self._how
            )
        try:
            self.wait_for(lambda: self._has_port(), "listening")
            self.wait_for(lambda: self.get("/ready")[0] == 200, "ready")
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """The engine; the front end, a process of its own, goes on."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text()

    def wait_for(self, condition: Any, what: str, seconds: float = WAIT_S) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it has ended, {what} no more: {self.text}"
            assert time.monotonic() < deadline, f"not {what} within {seconds} s: {self.text}"
            time.sleep(0.05)

    def get(self, path: str) -> tuple[int, str]:
        return self.send("GET", path)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON."""
        status, text = self.send("POST", path, json.dumps(body).encode())
        return status, json.loads(text)

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
        return send(self.port, method, path, body, **headers)

    def metrics(self) -> dict[str, float]:
        """Return metrics by name and labels, as written, without the model's and the engine's labels."""
        lines = [line for line in self.get("/metrics")[1].splitlines() if not line.startswith("#")]
        pairs = (line.rsplit(" ", 1) for line in lines)
        return {_plain(name): float(value) for name, value in pairs}

    def is_empty(self) -> bool:
        found = self.metrics()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "lopa_requests_open")
        return all(found[name] == 0 for name in (*names, "vllm:kv_cache_usage_perc"))

    def _has_port(self) -> bool:
        found = re.search(r"listening on http://[^:]+:(\d+)", self.text)
        self.port = int(found[1]) if found else 0
        return bool(found)


def _plain(name: str) -> str:
    bare, _, labels = name.rstrip("}").partition("{")
    kept = [label for label in labels.split(",") if label and not label.startswith(("engine=", "model_name="))]
    return f"{bare}{{{','.join(kept)}}}" if kept else bare


def events_of(text: str) -> list[Any]:
    """The events of a stream, `[DONE]` as it stands."""
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in found]
