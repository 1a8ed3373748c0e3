"""Measure a server's start by part, from the process's start to its first answers: with none of Triton's kernels
compiled, and again.

python -m scripts.lab.start PROFILE MODEL OUT.json    on a GPU

Parts end at lines of the server's log: tiles are read once torch is imported and the GPU found; captures say how long
they took, and what lies between is loading the weights and sizing the KV cache.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.lab.result import asked_s, card, commit, write
from tests.ports import free_port

BODY = b'{"prompt": "What is 2 + 3?", "max_tokens": 256}'
_TILES, _CAPTURED, _READY = "linear tiles of", re.compile(r"captured (\d+) shapes in ([0-9.]+) s"), "ready on http"


def started(profile: str, model: str, kernels: str) -> list[float]:
    """Return a row of the result. kernels: the folder where Triton keeps those that it has compiled."""
    port, began = free_port(), time.perf_counter()
    command = [sys.executable, "-m", "common.commands", "serve", model, "--profile", profile, "--port", str(port)]
    environment = {**os.environ, "TRITON_CACHE_DIR": kernels}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    tiles_s = captured_s = captured_at = now = 0.0
    num_graphs = 0
    for line in server.stderr:
        now = time.perf_counter() - began
        if _TILES in line:
            tiles_s = now
        elif found := _CAPTURED.search(line):
            num_graphs, captured_s, captured_at = int(found[1]), float(found[2]), now
        elif _READY in line:
            break
    answers = [asked_s(port, "POST", "/v1/completions", BODY) for _ in range(2)]
    server.terminate()
    server.communicate()
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    loaded_s = captured_at - captured_s - tiles_s
    return [tiles_s, loaded_s, num_graphs, captured_s, now, *answers, peak_mib]


def main(profile: str, model: str, out: str) -> None:
    columns = [
        ["start", ""], ["imports, GPU found, s", ".1f"], ["weights, KV cache, s", ".1f"], ["graphs", ".0f"],
        ["their capture, s", ".1f"], ["ready after, s", ".1f"], ["first answer, s", ".2f"], ["second, s", ".2f"],
        ["host memory, MiB", ",.0f"],
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as kernels:
        rows = [[name, *started(profile, model, kernels)] for name in ("kernels compiled", "kernels found")]
    command = f"python -m scripts.lab.start {profile} {model} {out}"
    write(Path(out), {"card": card("cuda"), "commit": commit(), "command": command, "columns": columns, "rows": rows})


if __name__ == "__main__":
    main(*sys.argv[1:])
