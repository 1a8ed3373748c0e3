"""Bad weather for a server: clients that go, bodies that are none, signals under load. Tests make a little of it.

python -m tests.engine.serving.storms 20     times SIGTERM under load; hours of mixed load are tests/soak
"""

from __future__ import annotations

import json
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.engine.serving.served import QUESTION, Served, events_of

FEW_BRANCHES = ("--set", "max_num_requests=8", "--set", "decode.num_lookahead=1")


def body_of(rng: random.Random, **fixed: Any) -> dict[str, Any]:
    """A request with settings of its own."""
    made = {
        "prompt": QUESTION.format(rng.randint(1, 99)) + "\n",
        "max_tokens": rng.choice([1, 8, 16, 40, 64]),
        "stream": rng.random() < 0.5,
        "ignore_eos": rng.random() < 0.3,
        "diffusion": {"num_lookahead": rng.randint(0, 1), "skip_threshold": rng.choice([0.7, 0.9, 0.95])},
    }
    if rng.random() < 0.3:
        made["stop"] = ["Step 2"]
    return {**made, **fixed}


def leave_early(server: Served, rng: random.Random) -> None:
    """Send a request, read a little or nothing, and hang up, or have it aborted by its id."""
    name = f"left{rng.getrandbits(60):x}"
    body = json.dumps(body_of(rng, max_tokens=192, ignore_eos=True, request_id=name)).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(rng.choice([0, 0.01, 0.1, 0.5]))
        if rng.random() < 0.3:
            server.post("/abort_request", {"request_id": name})
            connection.recv(100)


def abort_many(server: Served, count: int, at_once: int = 16) -> None:
    """Requests that are left or aborted, among others that are answered in full."""

    def one(seed: int) -> None:
        rng = random.Random(seed)
        if seed % 8 == 0:
            status, _ = server.send("POST", "/v1/completions", json.dumps(body_of(rng, max_tokens=8)).encode())
            assert status == 200
        else:
            leave_early(server, rng)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, range(count)))


def malformed(rng: random.Random) -> bytes:
    """What no server should answer with anything but 4xx."""
    wrong: list[Any] = [
        None, -1, 1e400, "\ud800", [], {}, [[]], [None], "x" * 5000, 2**70, True, [-1], [10**9], {"a": 1}, 0.5, "",
    ]  # fmt: skip
    kind = rng.randrange(6)
    if kind == 0:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 60)))
    if kind == 1:
        whole = json.dumps(body_of(rng)).encode()
        return whole[: rng.randrange(1, len(whole) - 1)]
    if kind == 2:
        return b"[" * rng.randrange(1, 50_000)
    if kind == 3:
        return json.dumps(rng.choice(wrong[3:])).encode()
    body = body_of(rng)
    if kind == 4:
        body["prompt"] = rng.choice([None, -1, [[]], [None], True, [-1], [10**9], {"a": 1}, 0.5, [1, "a"], [], [["a"]]])
    else:
        name = rng.choice(
            ["max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "diffusion", "logprobs"]
        )
        body[name] = rng.choice([-1, "\ud800", [[]], [None], "x", 2**70, [-1], {"a": 1}, 1e300])
        body["logit_bias"] = {"1": "much"}
    return json.dumps(body).encode()


def statuses_of_malformed(server: Served, count: int) -> Counter[int]:
    """Return counts by status, over all routes that take a body. -1: no answer."""
    routes = ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"]

    def one(seed: int) -> int:
        rng = random.Random(seed)
        route = routes[0] if seed % 2 else rng.choice(routes[1:])
        body = malformed(rng)
        if route != routes[0]:
            body = body.replace(b'"prompt"', b'"what"')
        try:
            return server.send("POST", route, body)[0]
        except (OSError, HTTPException):
            return -1

    with ThreadPoolExecutor(4) as pool:
        return Counter(pool.map(one, range(count)))


def stream_under(server: Served, end: Any, num_clients: int = 8) -> tuple[int, int]:
    """Clients stream again and again until `end` has made the server refuse them.

    Streams that are whole, and those that are not: neither ended with [DONE] nor refused.
    """
    whole, torn = 0, []

    def client(seed: int) -> None:
        nonlocal whole
        rng = random.Random(seed)
        for _ in range(100):
            body = json.dumps(body_of(rng, stream=True, max_tokens=rng.choice([16, 64]))).encode()
            try:
                status, text = server.send("POST", "/v1/completions", body)
            except ConnectionRefusedError:
                return
            except (OSError, HTTPException) as error:
                torn.append(repr(error))
                return
            if status == 503:
                return
            if status == 200 and events_of(text)[-1] == "[DONE]":
                whole += 1
            else:
                torn.append(text[-300:])

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(num_clients)]
    for thread in threads:
        thread.start()
    end()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a client hangs"
    return whole, len(torn)


def sigterm_under_load(log: Path, seed: int) -> tuple[int, int, int, float]:
    """Whole streams, torn ones, the exit code, and seconds from the signal to the end."""
    with Served(log, *FEW_BRANCHES) as server:
        told_at = 0.0

        def end() -> None:
            nonlocal told_at
            time.sleep(random.Random(seed).uniform(0.3, 2.0))
            told_at = time.monotonic()
            server.process.send_signal(signal.SIGTERM)

        whole, torn = stream_under(server, end)
        return whole, torn, server.process.wait(30), time.monotonic() - told_at


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(int(sys.argv[1])):
            whole, torn, exit_code, seconds = sigterm_under_load(Path(folder) / "log", seed)
            print(f"whole {whole}, torn {torn}, exit code {exit_code}, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
