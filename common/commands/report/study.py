"""What lies in a folder of results: sweeps, single runs, and benches.

A file that is none of them is left out. One that looks like one of them and cannot be read is named in the report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.commands.report.content import Bench, Board, RunMetrics, fits
from common.errors import ConfigError

Metrics = Mapping[str, Any]
_MOST_FILES = 10_000
_OF_METRICS = ("requests", "tpf", "tps", "latency_s", "steps", "run")
_UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class Point:
    """One setting. number: in the tables and pictures. metrics: None where it is not done; error: why not."""

    number: int
    name: str
    status: str
    error: str | None
    decode: Mapping[str, Any]
    metrics: Metrics | None

    @property
    def workload(self) -> str:
        """What was decoded on what, in a line: points that differ here are not compared with each other."""
        if self.metrics is None:
            return ""
        run, environment = self.metrics["run"], self.metrics.get("environment", {})
        source = run.get("input") or {}
        limit, benchmark = source.get("limit"), source.get("benchmark")
        weights = ", random weights (texts and accuracy mean nothing)" if run.get("load_format") == "dummy" else ""
        facts = [
            f"{run.get('model', _UNKNOWN)}{weights}",
            f"{source.get('path', _UNKNOWN)}{f', the first {limit}' if limit else ''}",
            *(
                [f"benchmark {benchmark}{' as a chat' if source.get('apply_chat_template') else ''}"]
                if benchmark
                else []
            ),
            f"{run.get('max_num_requests', 1)} at once",
            *(f"{key} {environment[key]}" for key in ("profile", "device") if environment.get(key) is not None),
        ]
        return "; ".join(facts)

    @property
    def conditions(self) -> str:
        """Where its numbers come from, in a line."""
        if self.metrics is None:
            return ""
        environment = self.metrics.get("environment", {})
        known = [(key, environment[key]) for key in _VERSIONS if environment.get(key) is not None]
        scored_by = (self.metrics["accuracy"] or {}).get("scored_by", {})
        marked = [f"marked by {' and by '.join(scored_by)}"] if scored_by else []
        return "; ".join([self.workload, *marked, *(f"{key} {_short_commit(str(value))}" for key, value in known)])


_VERSIONS = ("engine", "dtype", "quantization", "torch", "seed", "commit")


def _short_commit(text: str) -> str:
    """A hash by its first letters; anything else as it is."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}\b", r"\1", text)


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together: a sweep, or the single runs of the folder."""

    name: str
    points: tuple[Point, ...]

    @property
    def measured(self) -> list[tuple[Point, Metrics]]:
        """Points with finished requests, and their numbers."""
        pairs = ((point, point.metrics) for point in self.points)
        return [(point, metrics) for point, metrics in pairs if metrics is not None and metrics["requests"]["finished"]]


@dataclass(frozen=True, slots=True)
class Study:
    title: str
    series: tuple[Series, ...]
    benches: tuple[tuple[str, Mapping[str, Any]], ...]
    unread: tuple[str, ...] = field(default=())

    @property
    def points(self) -> list[Point]:
        return [point for series in self.series for point in series.points]

    @property
    def measured(self) -> list[tuple[Point, Metrics]]:
        return [pair for series in self.series for pair in series.measured]


def read_study(results: Path) -> Study:
    """Read a folder with all below it, or one file. Raises ConfigError where there is nothing to report."""
    if not results.exists():
        raise ConfigError(f"{results}: no such folder or file: give the folder of a sweep's or a run's results")
    sweeps, runs, benches, unread = [], [], [], []
    for path in _files(results):
        found = _content(path)
        if found is None:
            if path.name == "sweep.json" or path.name.endswith(".metrics.json"):
                unread.append(str(path))
        elif "rows" in found and "definitions" in found:
            sweeps.append((path, found)) if fits(Board, found) else unread.append(str(path))
        elif all(key in found for key in _OF_METRICS):
            runs.append((path, found)) if fits(RunMetrics, found) else unread.append(str(path))
        elif "shapes" in found and "floors" in found:
            benches.append((str(path), found)) if fits(Bench, found) else unread.append(str(path))
    series = list(_series(sweeps, runs))
    if not series and not benches:
        known = f"; {', '.join(unread)} cannot be read" if unread else ""
        raise ConfigError(
            f"{results}: no results in it: expected a sweep.json, a *.metrics.json or a bench's JSON{known}"
        )
    return Study(results.resolve().name, tuple(series), tuple(benches), tuple(unread))


def _files(results: Path) -> list[Path]:
    if results.is_file():
        return [results]
    found = []
    for path in results.rglob("*.json"):
        if path.is_file() and not path.name.endswith(".run.json"):
            found.append(path)
        if len(found) > _MOST_FILES:
            raise ConfigError(f"{results}: more than {_MOST_FILES} JSON files below it: name the folder of one study")
    return sorted(found)


def _content(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _series(
    sweeps: Sequence[tuple[Path, dict[str, Any]]], runs: Sequence[tuple[Path, dict[str, Any]]]
) -> Iterator[Series]:
    """Sweeps, and last what belongs to none of them."""
    number, folders = 0, {path.parent for path, _ in sweeps}
    for path, board in sweeps:
        points = tuple(_point(number + place, row) for place, row in enumerate(board["rows"], start=1))
        number += len(points)
        yield Series(path.parent.name, points)
    single = [(path, metrics) for path, metrics in runs if path.parent not in folders]
    rows = [{"name": path.name.removesuffix(".metrics.json"), "metrics": metrics} for path, metrics in single]
    if rows:
        yield Series("single runs", tuple(_point(number + place, row) for place, row in enumerate(rows, start=1)))


def _point(number: int, row: Mapping[str, Any]) -> Point:
    metrics = row.get("metrics")
    decode = row.get("decode") or ((metrics or {}).get("run") or {}).get("decode") or {}
    return Point(number, str(row.get("name", number)), row.get("status", "done"), row.get("error"), decode, metrics)


def differing(points: Sequence[Point]) -> list[str]:
    """Keys of decode that are not the same for all of them."""
    keys = dict.fromkeys(key for point in points for key in point.decode)
    return [key for key in keys if len({json.dumps(point.decode.get(key)) for point in points}) > 1]
