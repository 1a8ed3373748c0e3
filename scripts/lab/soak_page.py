"""Put the result of a soak where docs/reliability.md reads it: tables into the page, pictures beside it.

python -m scripts.lab.soak_page outputs/soak/soak.json [--name cpu]

The file becomes docs/results/soak_NAME.json; its pictures are docs/pictures/soak_NAME_light.svg and _dark.svg. Three
panels over hours: memory, handles and threads of the idle server, and how long one request takes alone.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from common.commands.report.svg import Plot, ticks
from scripts.lab import tables
from scripts.lab.draw_results import ROOT, THEMES, Theme, read, side_by_side


def draw(result: dict[str, Any], theme: Theme) -> str:
    """All panels, as an SVG file. Raises KeyError for a result that is not whole."""
    return side_by_side([memory(result["samples"]), held(result["rounds"]), alone(result["rounds"])], theme)


def memory(samples: dict[str, list[float]]) -> Plot:
    """Resident memory by part of the server, faults and all."""
    series = {name: samples[f"{name} MiB"] for name in ("replicas", "front end", "launcher")}
    return _over_hours("Resident memory", samples["hours"], series, "MiB")


def held(rounds: list[dict[str, Any]]) -> Plot:
    series = {name: [one[name] for one in rounds] for name in ("handles", "threads")}
    return _over_hours("Held by the idle server", [one["hours"] for one in rounds], series, "number")


def alone(rounds: list[dict[str, Any]]) -> Plot:
    """One request of 192 tokens after each fault."""
    hours, milliseconds = [one["hours"] for one in rounds], [1000 * one["probe s"] for one in rounds]
    plot = _over_hours("One long request alone", hours, {"after each fault": milliseconds}, "ms")
    for one, hour, ms in zip(rounds, hours, milliseconds, strict=True):
        plot.dot(hour, ms, "c0", f"{one['fault']}: {ms:.0f} ms")
    return plot


def _over_hours(title: str, hours: list[float], series: dict[str, list[float]], unit: str) -> Plot:
    plot = Plot(title, ticks(0, max(hours)), ticks(0, max(map(max, series.values()))), "hours", unit)
    styles = dict(zip(series, ("c0", "c1", "c5"), strict=False))
    for name, values in series.items():
        plot.line(list(zip(hours, values, strict=True)), styles[name])
    for name, values in series.items():
        middle = len(hours) // 2
        plot.label(hours[middle], values[middle], name, styles[name])
    return plot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--name", default="cpu", help="what the device is called in names of files")
    given = parser.parse_args()
    kept = tables.RESULTS / f"soak_{given.name}.json"
    if given.result.resolve() != kept:
        shutil.copyfile(given.result, kept)
    for theme in THEMES:
        picture = ROOT / "docs" / "pictures" / f"soak_{given.name}_{theme.name}.svg"
        picture.write_text(draw(read(kept), theme), encoding="utf-8")
    tables.write()


if __name__ == "__main__":
    main()
