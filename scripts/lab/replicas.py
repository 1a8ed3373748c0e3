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
import tempfile
import time
from functools import partial
from pathlib import Path

from scripts.lab.result import ROOT, commit, write
from tests.engine.serving.served import WAIT_S, Served
from tests.engine.serving.streams import Stream, pid_of

_SETTINGS = {
    "demo": ["decode.num_lookahead=0"],
    "dream_7b_dummy": [
        "decode.num_lookahead=0", "decode.block_size=8", "decode.block_add_threshold=1", "max_model_len=512",
    ],
}  # fmt: skip
_LENGTH = 64
_PER_REPLICA = 64


def served(run: str, profile: str, num_replicas: int, log: Path) -> Served:
    """Return a server of some replicas, to be entered."""
    settings = [*_SETTINGS[run], f"mesh.data_parallel_size={num_replicas}", f"max_num_requests={_PER_REPLICA}"]
    given = [word for setting in (*settings, "serve.num_front_ends=4") for word in ("--set", setting)]
    return Served(log, *given, model=run, profile=profile)


def is_whole(server: Served, num_replicas: int) -> bool:
    return json.loads(server.get("/ready")[1]).get("replicas", ["ready"]) == ["ready"] * num_replicas


def prompts(count: int) -> list[str]:
    return [f"Tom has {number + 3} apples and buys {number % 7 + 2} more.\n" for number in range(count)]


def tokens_per_s(server: Served, at_once: int, num_clients: int) -> float:
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


def killed(server: Served, num_replicas: int) -> list[float | None]:
    """Kill a replica amid its answers, while as many requests wait. Return the requests, those answered, those ended
    with an error, and the seconds until the last error."""
    streams = [Stream(server.port, prompt, 256) for prompt in prompts(2 * _PER_REPLICA * num_replicas)]
    deadline = time.monotonic() + WAIT_S
    while sum(stream.has_begun for stream in streams) < _PER_REPLICA * num_replicas * 0.9:
        assert time.monotonic() < deadline, "the answers do not begin"
        time.sleep(0.002)
    at = time.monotonic()
    os.kill(pid_of(server, num_replicas - 1), signal.SIGKILL)
    for stream in streams:
        stream.join(WAIT_S)
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
            with (
                tempfile.TemporaryDirectory() as folder,
                served(run, known.profile, num_replicas, Path(folder) / "log") as server,
            ):
                server.wait_for(partial(is_whole, server, num_replicas), "whole")
                tokens_per_s(server, 8 * num_replicas, known.clients)  # what is slow once
                for a_replica in (1, 16, _PER_REPLICA):
                    rate = tokens_per_s(server, a_replica * num_replicas, known.clients)
                    first.setdefault(a_replica, rate / num_replicas)
                    rows.append([run, num_replicas, a_replica * num_replicas, rate, rate / first[a_replica]])
                    print(rows[-1], flush=True)
                if num_replicas > 1:
                    ended.append([run, num_replicas, *killed(server, num_replicas)])
                    print(ended[-1], flush=True)
    shared = {
        "card": device(),
        "commit": commit(),
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
    write(Path(known.output), {"tables": {"rates": rates, "killed": ends}})


if __name__ == "__main__":
    main()
