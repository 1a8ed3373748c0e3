"""What has become of each point of a sweep: `sweep.json` in its folder, and the tables made of it.

It is written by whoever leads the sweep at the moment: the launcher between two launches, rank 0 of a launch within.
Records and metrics of a point lie beside it and are the truth; this file can be deleted, and the next start makes it
anew.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.batch import result_file, sweep_table, write_whole
from common.config import Sweep, SweepPoint, slug
from common.errors import ConfigError
from common.hub import known_as
from common.scoring import DEFINITIONS, area_under_accuracy, flat_numbers
from common.tables import markdown

Row = dict[str, Any]
_SHOWN_DECODE = (
    "strategy", "num_lookahead", "block_size", "max_new_tokens", "block_add_threshold", "decoded_token_threshold",
    "skip_threshold",
)  # fmt: skip
_FINGERPRINT = ("engine", "device", "device_name", "torch", "lopa", "commit", "profile", "seed")


class Board:
    """The points of a sweep, in the order of its file.

    A row: name, status, failures (how often the point has failed), error (the last failure's sentence), profile, run,
    decode, metrics (None until it is done), seconds (of decoding).
    """

    def __init__(self, sweep: Sweep) -> None:
        self.path = sweep.folder / "sweep.json"
        self._sweep = sweep

    def rows(self) -> list[Row]:
        """Rows of points that the file still names."""
        known = {row["name"]: row for row in self._read()}
        return [known[name] for name in self._sweep.names if name in known]

    def begin(self, points: Sequence[SweepPoint]) -> None:
        """Note that these points are to be run, and drop what is known of a point under other settings.

        Raises ConfigError where the folder holds another sweep, or other files of these names.
        """
        self._require_own_folder()
        earlier = {row["name"]: row for row in self.rows()}
        for point in points:
            row, own = earlier.get(point.name), _own(point)
            if row is None or row["decode"] != own["decode"]:
                row = {"failures": 0, "error": None, "metrics": None, "seconds": None}
            earlier[point.name] = {**row, **own, "status": "waiting"}
        self._write([earlier[name] for name in self._sweep.names if name in earlier])

    def run(self, name: str) -> None:
        self._change(name, status="running")

    def wait(self, name: str) -> None:
        """Note that its run was stopped by the user."""
        self._change(name, status="waiting")

    def finish(self, name: str, metrics: Mapping[str, Any]) -> None:
        row = self.row(name)
        start = metrics.get("this_start")
        seconds = start["wall_s"] if start and start["requests"] else row["seconds"]
        if start is None and row["metrics"]:  # nothing was left to do: the aggregate is an earlier start's
            metrics = {**metrics, **{key: value for key, value in row["metrics"].items() if key == "this_start"}}
        self._change(name, status="done", error=None, failures=0, metrics=dict(metrics), seconds=seconds)

    def fail(self, name: str, sentence: str) -> None:
        self._change(name, status="failed", error=sentence, failures=self.row(name)["failures"] + 1)

    def has_failed_before(self, name: str) -> bool:
        return bool(self.row(name)["failures"])

    def left(self, names: Sequence[str]) -> list[str]:
        """Return those of these points that are not done."""
        status = {row["name"]: row["status"] for row in self.rows()}
        return [name for name in names if status.get(name) != "done"]

    def seconds_left(self) -> float | None:
        """Estimate by the mean of the points that have been decoded; None before the first."""
        rows = self.rows()
        taken = [row["seconds"] for row in rows if row["status"] == "done" and row["seconds"] is not None]
        left = sum(row["status"] in ("waiting", "running") for row in rows)
        return sum(taken) / len(taken) * left if taken else None

    def publish(self) -> tuple[list[str], list[list[str]], float | None]:
        """Write sweep.csv and sweep.md; the table, and AUP. Raises ConfigError."""
        rows = [row for row in self.rows() if row["metrics"] is not None]
        headings, cells = sweep_table("setting", rows)
        write_whole(self.path.with_suffix(".csv"), _csv(self.rows()))
        write_whole(self.path.with_suffix(".md"), markdown(headings, cells) + "\n")
        return headings, cells, area_under_accuracy([row["metrics"] for row in rows])

    def row(self, name: str) -> Row:
        return next(row for row in self.rows() if row["name"] == name)

    def _require_own_folder(self) -> None:
        other, own = Path(str(self._content().get("sweep", ""))), self._sweep.path
        if other.stem and other.stem != own.stem:
            raise ConfigError(
                f"{self.path.parent}: holds results of the sweep {other.stem}: choose another folder for {own.stem}, "
                "by --set output.path=outputs/NAME.jsonl, or by folder in the sweep"
            )
        result_file("sweep", self.path.with_suffix(".csv"), begin=b"name,status,")
        result_file("sweep", self.path.with_suffix(".md"), begin=b"| ")

    def _change(self, name: str, **values: Any) -> None:
        self._write([row | values if row["name"] == name else row for row in self.rows()])

    def _read(self) -> list[Row]:
        try:
            rows = self._content()["rows"]
            return [row for row in rows if {"name", "status", "failures", "decode", "metrics", "seconds"} <= row.keys()]
        except (LookupError, TypeError, AttributeError):
            return []  # not ours: what it would say is made anew

    def _content(self) -> Row:
        """What the file says; nothing where it is not there, or is no JSON object."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def _write(self, rows: Sequence[Row]) -> None:
        done = [row["metrics"] for row in rows if row["metrics"] is not None]
        board = {
            "sweep": str(self._sweep.path),
            "rows": rows,
            "area_under_accuracy": area_under_accuracy(done),
            "definitions": DEFINITIONS,
        }
        write_whole(self.path, json.dumps(board, indent=2, ensure_ascii=False) + "\n")


def _own(point: SweepPoint) -> Row:
    return {
        "name": point.name,
        "profile": point.profile.name,
        "run": str(point.run_path),
        "model": known_as(point.run.model),
        "load_format": point.run.load_format,
        "decode": point.run.decode.model_dump(mode="json"),
    }


def _csv(rows: Sequence[Row]) -> str:
    """A line a point: what it is, its numbers, the decode settings that are usual or differ, where it was measured."""
    first = rows[0]["decode"] if rows else {}
    differing = [key for key in first if any(row["decode"].get(key) != first[key] for row in rows)]
    settings = dict.fromkeys((*_SHOWN_DECODE, *differing))
    lines = [_csv_line(row, list(settings)) for row in rows]
    columns = dict.fromkeys(column for line in lines for column in line)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue()


def _csv_line(row: Row, settings: Sequence[str]) -> Row:
    metrics = row["metrics"]
    environment = {} if metrics is None else metrics.get("environment", {})
    return {
        "name": row["name"],
        "status": row["status"],
        "error": row["error"] or "",
        **({} if metrics is None else flat_numbers(metrics)),
        **{key: row["decode"].get(key) for key in settings},
        **{key: environment[key] for key in _FINGERPRINT if key in environment},
        "records": f"{slug(row['name'])}.jsonl",
        "metrics": f"{slug(row['name'])}.metrics.json",
    }
