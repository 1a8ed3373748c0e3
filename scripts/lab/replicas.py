"""Measure a server of several replicas: tokens/s by their number, and what a killed one costs under load.

python -m scripts.lab.replicas PROFILE OUTPUT.json [--replicas 1 2 4] [--runs demo dream_7b_dummy] [--clients 8]

Each replica has a device of its own. Clients are processes of common/bench/client.py, which stream completions. With
random weights one token is filled in each pass.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
_WAIT_S = 240.0
_SETTINGS = {
    "demo": ["decode.num_lookahead=0"],
    "dream_7b_dummy": [
        "decode.num_lookahead=0", "decode.block_size=8", "decode.block_add_threshold=1",
        "max_model_len=512",
    ],
}  # fmt: skip
_LENGTH = 64
_PER_REPLICA = 64


class Server:
    """`lopa serve` with some replicas on a free port, as a context."""

    def __init__(self, run: str, profile: str, num_replicas: int) -> None:
        self.port = free_port()
        settings = [*_SETTINGS[run], f"mesh.data_parallel_size={num_replicas}", f"max_num_requests={_PER_REPLICA}"]
        settings += [f"serve.port={self.port}", "serve.num_front_ends=4"]
        given = [word for setting in settings for word in ("--set", setting)]
        command = [sys.executable, "-m", "common.commands", "serve", run, "--profile", profile, *given]
        self._process = subprocess.Popen(command, cwd=ROOT)
        self._num_replicas = num_replicas

    def __enter__(self) -> Server:
        deadline = time.monotonic() + _WAIT_S
        while not self._is_ready():
            assert self._process.poll() is None and time.monotonic() < deadline, "the server does not become ready"
            time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def get(self, path: str) -> str:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=_WAIT_S)
        connection.request("GET", path)
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    def kill(self, replica: int) -> None:
        """Kill the process of a replica."""
        pid = self._process.pid
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            if b"LOPA_REPLICA=%d" % replica in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                os.kill(child, signal.SIGKILL)

    def _is_ready(self) -> bool:
        try:
            found = json.loads(self.get("/ready"))
        except (OSError, ValueError):
            return False
        return found.get("status") == "ready" and found.get("replicas", ["ready"]) == ["ready"] * self._num_replicas


def prompts(count: int) -> list[str]:
    return [f"Tom has {number + 3} apples and buys {number % 7 + 2} more.\n" for number in range(count)]


def tokens_per_s(server: Server, at_once: int, num_clients: int) -> float:
    """Ask for three times as many requests as at once, by several processes, and return the sum of all tokens/s."""
    num_clients = min(num_clients, at_once)
    order = {"at_once": at_once // num_clients, "max_tokens": _LENGTH, "num_lookahead": 0}
    clients = []
    for number in range(num_clients):
        client = subprocess.Popen(
            [sys.executable, str(ROOT / "common/bench/client.py"), str(server.port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        clients.append(client)
        assert client.stdin is not None
        shown = prompts(3 * at_once)[number::num_clients]
        client.stdin.write(json.dumps({**order, "prompts": shown}))
    for client in clients:
        assert client.stdin is not None
        client.stdin.close()
    results = []
    for client in clients:
        assert client.stdout is not None
        results.append(json.loads(client.stdout.read()))
        client.wait()
    return sum(result["tokens_per_s"] for result in results)


class Stream(threading.Thread):
    """A client of a stream, and how it ended."""

    def __init__(self, port: int, prompt: str) -> None:
        super().__init__(daemon=True)
        self._port, self._prompt = port, prompt
        self.error, self.ended_at, self.has_begun, self.is_whole = "", 0.0, False, False
        self.start()

    def run(self) -> None:
        body = {"prompt": self._prompt, "max_tokens": 256, "ignore_eos": True, "stream": True}
        connection = HTTPConnection("127.0.0.1", self._port, timeout=_WAIT_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: [DONE]"):
                self.is_whole = not self.error
            elif line.startswith(b"data: {"):
                event = json.loads(line[6:])
                self.error = self.error or event.get("error", {}).get("message", "")
                self.has_begun = self.has_begun or any(choice["text"] for choice in event.get("choices", ()))
        self.ended_at = time.monotonic()
        connection.close()


def killed(server: Server, num_replicas: int) -> list[float | None]:
    """Kill a replica amid its answers, while as many requests wait. Return the requests, those
    answered, those ended with an error, and the seconds until the last error."""
    streams = [Stream(server.port, prompt) for prompt in prompts(2 * _PER_REPLICA * num_replicas)]
    deadline = time.monotonic() + _WAIT_S
    while sum(stream.has_begun for stream in streams) < _PER_REPLICA * num_replicas * 0.9:
        assert time.monotonic() < deadline, "the answers do not begin"
        time.sleep(0.002)
    at = time.monotonic()
    server.kill(num_replicas - 1)
    for stream in streams:
        stream.join(_WAIT_S)
    lost = [stream for stream in streams if stream.error]
    whole = sum(stream.is_whole for stream in streams)
    assert len(lost) + whole == len(streams), "each stream ends whole or with an error"
    return [len(streams), whole, len(lost), max((stream.ended_at - at for stream in lost), default=None)]


def device() -> str:
    """Return what the replicas run on, in words."""
    import torch

    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name()}" if count else f"A CPU of {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile")
    parser.add_argument("output")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", nargs="+", choices=_SETTINGS, default=list(_SETTINGS))
    parser.add_argument("--clients", type=int, default=8)
    known = parser.parse_args()
    rows: list[list[object]] = []
    ended: list[list[object]] = []
    for run in known.runs:
        first = {}
        for num_replicas in known.replicas:
            with Server(run, known.profile, num_replicas) as server:
                tokens_per_s(server, 8 * num_replicas, known.clients)  # what is slow once
                for a_replica in (1, 16, _PER_REPLICA):
                    rate = tokens_per_s(server, a_replica * num_replicas, known.clients)
                    first.setdefault(a_replica, rate / num_replicas)
                    rows.append([run, num_replicas, a_replica * num_replicas, rate, rate / first[a_replica]])
                    print(rows[-1], flush=True)
                if num_replicas > 1:
                    ended.append([run, num_replicas, *killed(server, num_replicas)])
                    print(ended[-1], flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    shared = {
        "card": device(),
        "commit": commit.strip(),
        "command": "python -m scripts.lab.replicas " + " ".join(sys.argv[1:]),
    }
    rates = {
        **shared,
        "conditions": f"One server, four front ends, {known.clients} client processes, answers of {_LENGTH} tokens, "
        "k = 0. Demo: its own answers. dream_7b_dummy: random weights, one token a pass of a block of eight",
        "columns": [["run", ""], ["replicas", ",.0f"], ["at once", ",.0f"], ["tokens/s", ",.0f"], ["over one", ".2f"]],
        "rows": rows,
    }
    ends = {
        **shared,
        "conditions": f"A replica is killed while all are amid {_PER_REPLICA} streams each and as many wait",
        "columns": [
            ["run", ""], ["replicas", ",.0f"], ["requests", ",.0f"], ["answered", ",.0f"],
            ["ended with an error", ",.0f"], ["seconds to the last error", ".2f"],
        ],
        "rows": ended,
    }  # fmt: skip
    result = {"tables": {"rates": rates, "killed": ends}}
    Path(known.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
