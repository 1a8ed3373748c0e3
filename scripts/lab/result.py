"""What every result file of docs/results says of where it comes from, and how it is written."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


def commit() -> str:
    """Return the checkout's commit, in short; `unknown` outside of a repository."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def busy_cpu() -> str:
    """Return this machine in words, for a measurement beside other work."""
    return f"A CPU of {os.cpu_count()} cores that others use too, load average {os.getloadavg()[0]:.0f}"


def card(device: str) -> str:
    """Return what a profile's `device` is here, in words."""
    return torch.cuda.get_device_name() if device == "cuda" else busy_cpu()


def asked_s(port: int, method: str, path: str, body: bytes | None = None) -> float:
    """Return the seconds of one request to a server here, on a connection of its own."""
    began, connection = time.perf_counter(), HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    assert answer.status == 200, said
    return time.perf_counter() - began


def heldout_math(count: int) -> list[dict[str, Any]]:
    """Return the first held-out math problems of the demo model."""
    lines = (ROOT / "models" / "demo" / "heldout_math.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def write_table(
    path: Path, card: str, command: str, conditions: str, columns: Sequence[Any], rows: Sequence[Sequence[Any]]
) -> None:
    """Write a result file of one table, at this commit."""
    head = {"card": card, "commit": commit(), "command": command, "conditions": conditions}
    write(path, {**head, "columns": columns, "rows": rows})


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result file (scripts/lab/tables.py says what it holds)."""
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
