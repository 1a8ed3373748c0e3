"""Draw the README's picture from the measurements in docs/results, once for light pages and once for dark ones.

python scripts/draw_results.py [--results docs/results] [--out docs/pictures]     # pip install -e '.[plot]'

Two panels show accuracy over tokens per forward pass, one point for each number of lookaheads. The third shows the time
of a step over the width of its window, beside what reading the weights and multiplying take at least. The same files
give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

ROOT = Path(__file__).resolve().parents[1]
STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "svg.hashsalt": "lopa",  # ids in the file depend on it, and on chance without it
}


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours for one kind of page; the background is the page's own."""

    name: str
    text: str
    faint: str
    first: str
    second: str


THEMES = (
    Theme("light", text="#1f2328", faint="#6e7781", first="#0969da", second="#bc4c00"),
    Theme("dark", text="#e6edf3", faint="#9198a1", first="#58a6ff", second="#f0883e"),
)


def draw(results: Path, theme: Theme) -> Figure:
    """All panels. Raises OSError or KeyError for a result file that is not there or not whole."""
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), theme.text)
    edges = dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), theme.faint)
    style: Any = {**STYLE, **colours, **edges}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(11.4, 3.7), layout="constrained")
        math, code, steps = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
        draw_lookahead(math, read(results / "lookahead_math.json"), theme.first)
        draw_lookahead(code, read(results / "lookahead_code.json"), theme.second)
        math.set(title="Math problems: accuracy", xlabel="tokens per forward pass")
        code.set(title="Code problems: accuracy", xlabel="tokens per forward pass")
        draw_steps(steps, read(results / "steps_h200.json"), theme)
    return figure


def draw_lookahead(axes: Axes, result: dict[str, Any], colour: str) -> None:
    """One point for each number of lookaheads k, with an error bar of one standard error."""
    rows = result["rows"]
    speed, accuracy = ([row[key] for row in rows] for key in ("tpf_effective", "accuracy"))
    error = [row["standard_error"] for row in rows]
    axes.errorbar(speed, accuracy, yerr=error, color=colour, marker="o", elinewidth=1, capsize=2)
    for place, row in enumerate(rows):
        name = f"k = {row['num_lookahead']}" if place == 0 else str(row["num_lookahead"])
        is_above = place % 2 == 0  # in turn, since neighbours may be close
        edge = row["accuracy"] + row["standard_error"] * (1 if is_above else -1)
        side: dict[str, Any] = {"ha": "center", "va": "bottom" if is_above else "top"}
        label(axes, name, (row["tpf_effective"], edge), (0, 3 if is_above else -3), fontsize=10, **side)
    axes.set(xlim=(1.8, 12.6), ylim=(0.75, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def draw_steps(axes: Axes, result: dict[str, Any], theme: Theme) -> None:
    """The steps of one row."""
    shapes = [shape for shape in result["shapes"] if shape["rows"] == 1]
    width = [shape["width"] for shape in shapes]
    step, reading, multiplying = (
        [shape[key] for shape in shapes] for key in ("device_ms", "weight_floor_ms", "matrix_floor_ms")
    )
    middle = len(shapes) // 2
    axes.plot(width, step, "-o", color=theme.first)
    axes.plot(width, reading, "--", color=theme.faint)
    axes.plot(width, multiplying, ":", color=theme.faint)
    label(axes, "a step", (width[middle], step[middle]), (-6, 6), color=theme.first, ha="right", va="bottom")
    label(axes, "weights read once", (width[0], reading[0]), (0, -4), color=theme.faint, va="top")
    beside = (width[-1], multiplying[middle])
    label(axes, "full matrix rate", beside, (0, -16), color=theme.faint, ha="right", va="top")
    axes.set(title="A step of a 7B model on one H200: ms", xlabel="positions in the window")
    axes.set(xticks=width[1::2], xlim=(20, 264), ylim=(0, None))


def label(axes: Axes, text: str, place: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """offset: in points."""
    axes.annotate(text, place, xytext=offset, textcoords="offset points", **style)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for theme in THEMES:
        figure = draw(arguments.results, theme)
        with matplotlib.rc_context(STYLE):
            about = {"Date": None, "Creator": None}
            figure.savefig(arguments.out / f"results_{theme.name}.svg", metadata=about)


if __name__ == "__main__":
    main()
