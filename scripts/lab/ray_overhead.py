"""Measure what Ray Serve adds to a request: `lopa serve` asked directly and through Serve's proxy, in turns.

python -m scripts.lab.ray_overhead [PAIRS]    needs ray; writes docs/results/ray_overhead_cpu.json

Both run the demo model on a CPU, one replica each, and stand still while the other is asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import ray
from ray import serve

from common.cluster import build_app
from scripts.lab.result import ROOT, asked_s, busy_cpu, write_table
from tests.ports import free_port

RESULT = ROOT / "docs" / "results" / "ray_overhead_cpu.json"
SETTINGS = ["max_num_requests=2"]
BODY = json.dumps({"prompt": "Tom has 12 apples.\n", "max_tokens": 16}).encode()
_WAIT_S = 600.0


def asked(port: int, method: str, path: str) -> float:
    """Return the milliseconds of one request."""
    return 1000 * asked_s(port, method, path, BODY if method == "POST" else None)


def in_turns(ports: tuple[int, int], method: str, path: str, num_pairs: int) -> tuple[float, float]:
    """Return the median milliseconds at each port."""
    for port in ports:
        asked(port, method, path)
    pairs = [[asked(port, method, path) for port in ports] for _ in range(num_pairs)]
    first, second = zip(*pairs, strict=True)
    return median(first), median(second)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, "the server does not become ready"
        time.sleep(0.5)


def is_ready(port: int) -> bool:
    try:
        return asked(port, "GET", "/ready") > 0
    except (OSError, AssertionError):
        return False


def main(num_pairs: int) -> None:
    direct, proxy = free_port(), free_port()
    given = [word for setting in [*SETTINGS, f"serve.port={direct}"] for word in ("--set", setting)]
    server = subprocess.Popen([sys.executable, "-m", "common.commands", "serve", "demo", "--profile", "cpu", *given])
    try:
        ray.init(address="local", num_cpus=4, object_store_memory=2**27, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": proxy})
        serve.run(build_app({"profile": "cpu", "run": "demo", "set": SETTINGS}), name="lopa")
        wait_until(lambda: is_ready(direct))
        rows = []
        for what, method, path in (
            ("GET /v1/models, no engine", "GET", "/v1/models"),
            ("a completion of 16 tokens", "POST", "/v1/completions"),
        ):
            of_direct, of_proxy = in_turns((direct, proxy), method, path, num_pairs)
            rows.append([what, of_direct, of_proxy, of_proxy - of_direct])
    finally:
        serve.shutdown()
        ray.shutdown()
        server.terminate()
        server.wait()
    conditions = f"ray {ray.__version__}. Medians of {num_pairs} requests each, in turns, on new connections"
    columns = [["request", ""], ["direct, ms", ".1f"], ["through Serve, ms", ".1f"], ["more, ms", ".1f"]]
    write_table(RESULT, busy_cpu(), "python -m scripts.lab.ray_overhead", conditions, columns, rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
