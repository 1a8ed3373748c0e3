"""The result file of a soak: tables for docs/reliability.md, samples for its pictures, and what broke."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from scripts.lab.result import commit
from tests.soak.asks import ENDS

_BATCH_COLUMNS = ("cycles", "disturbed", "restarts", "in", "out", "lost", "doubled", "wrong")


def result(
    command: str, hours: float, counts: Mapping[str, Counter[str]], batches: Mapping[str, Counter[str]],
    rounds: list[dict[str, Any]], samples: Mapping[str, list[float]], more: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return what is written as JSON. counts: requests by fault and end; batches: lines by fault."""
    source = {"card": card(), "commit": commit(), "command": command}
    return {
        "hours": round(hours, 2),
        "tables": {
            "server": {
                **source,
                "conditions": f"{hours:.2f} hours; requests by what was done to the server meanwhile",
                "columns": [["fault", ""], *([name, ",d"] for name in ("times", "in", *ENDS)), ["median s", ".2f"]],
                "rows": _server_rows(counts, rounds),
            },
            "batches": {
                "conditions": "Lines of batch runs, each disturbed once and started again until it was through",
                "columns": [["fault", ""], *([name, ",d"] for name in _BATCH_COLUMNS)],
                "rows": _with_sum([[fault, *(one[name] for name in _BATCH_COLUMNS)] for fault, one in batches.items()]),
            },
            "held": {
                "conditions": "What the idle server held after the first fault of all and after the last one",
                "columns": [["what", ""], ["first", ",.0f"], ["last", ",.0f"], ["most", ",.0f"]],
                "rows": _held_rows(rounds),
            },
        },
        "rounds": rounds,
        "samples": dict(samples),
        **more,
    }  # fmt: skip


def _server_rows(counts: Mapping[str, Counter[str]], rounds: list[dict[str, Any]]) -> list[list[Any]]:
    rows = []
    for fault, found in counts.items():
        own = [one for one in rounds if one["fault"] == fault]
        seconds = [one["median s"] for one in own if one["median s"] is not None]
        middle = median(seconds) if seconds else None
        rows.append([fault, len(own), found["in"], *(found[end] for end in ENDS), middle])
    return _with_sum(rows, last=[None])


def _with_sum(rows: list[list[Any]], last: list[Any] | None = None) -> list[list[Any]]:
    """The rows and their sum. last: cells of the sum's end, which are not added up."""
    if not rows:
        return rows
    width = len(rows[0]) - len(last or [])
    return [*rows, ["all", *(sum(row[place] for row in rows) for place in range(1, width)), *(last or [])]]


def _held_rows(rounds: list[dict[str, Any]]) -> list[list[Any]]:
    if not rounds:
        return []
    rows = [
        [name, *_first_last_most([one[name] for one in rounds])] for name in ("handles", "threads", "temporary files")
    ]
    for part in rounds[0]["MiB"]:
        rows.append([f"{part}, MiB", *_first_last_most([one["MiB"][part] for one in rounds if part in one["MiB"]])])
    milliseconds = [1000 * one["probe s"] for one in rounds]
    return [*rows, ["a long request alone, ms", *_first_last_most(milliseconds)]]


def _first_last_most(values: list[float]) -> list[float]:
    return [values[0], values[-1], max(values)]


def card() -> str:
    """The device that decodes, or the host's processor."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return f"{model[0] if model else platform.machine()}, {len(model)} cores that others use too"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
