"""Draw the README's picture from the measurements in docs/results, once for light pages and once for dark ones.

python scripts/lab/draw_results.py [--results docs/results] [--out docs/pictures]

Two panels show accuracy over tokens per forward pass, one point for each number of lookaheads. The third shows the time
of a step over the width of its window, beside what reading the weights and multiplying take at least. The same files
give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.commands.report.svg import HEIGHT, WIDTH, Plot, ticks

ROOT = Path(__file__).resolve().parents[2]
GAP, HEAD = 22, 26  # between panels, and above them for their titles
STYLE = """
text {{ font: 13px system-ui, "DejaVu Sans", sans-serif; fill: {faint}; }}
.title, .axis {{ fill: {text}; }} .title {{ font-size: 14.5px; }}
.middle {{ text-anchor: middle; }} .end {{ text-anchor: end; }}
.grid {{ stroke: {faint}; stroke-width: 0.5; opacity: 0.4; }}
.line {{ fill: none; stroke-width: 1.9; stroke-linejoin: round; }} .thin {{ stroke-width: 1; opacity: 0.7; }}
.dashed {{ stroke-dasharray: 5 4; }}
.c0 {{ stroke: {first}; }} .c1 {{ stroke: {second}; }} .c5 {{ stroke: {faint}; }}
.dot, .label {{ stroke: none; }} .dot.c0, .label.c0 {{ fill: {first}; }} .dot.c1, .label.c1 {{ fill: {second}; }}
"""


class Theme(NamedTuple):
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


def draw(results: Path, theme: Theme) -> str:
    """All panels, as an SVG file. Raises OSError or KeyError for a result file that is not there or not whole."""
    panels = [
        lookahead_panel("Math problems", read(results / "lookahead_math.json"), "c0"),
        lookahead_panel("Code problems", read(results / "lookahead_code.json"), "c1"),
        steps_panel("A step of a 7B model on one H200", read(results / "steps_h200.json")),
    ]
    return side_by_side(panels, theme)


def side_by_side(panels: Sequence[Plot], theme: Theme) -> str:
    """Panels with their titles above them, as an SVG file."""
    width, height = len(panels) * (WIDTH + GAP), HEIGHT + HEAD
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}">']
    parts.append(f"<style>{STYLE.format(**theme._asdict())}</style>")
    for place, panel in enumerate(panels):
        left = GAP / 2 + place * (WIDTH + GAP)
        parts.append(f'<text class="title" x="{left + 8:g}" y="15">{panel.title}</text>')
        size = f'x="{left:g}" y="{HEAD}" width="{WIDTH:g}" height="{HEIGHT:g}" overflow="visible"'
        parts.append(panel.svg().replace("<svg ", f"<svg {size} ", 1))
    return "\n".join([*parts, "</svg>", ""])


def lookahead_panel(title: str, result: dict[str, Any], style: str) -> Plot:
    """One point for each number of lookaheads k, with an error bar of one standard error."""
    plot = Plot(
        title, ticks(2, 12), ticks(0.75, 1), "tokens per forward pass", "accuracy",
        y_name=lambda share: f"{100 * share:g} %",
    )  # fmt: skip
    rows = result["rows"]
    plot.line([(row["tpf_effective"], row["accuracy"]) for row in rows], style)
    for row in rows:
        tpf, share, error = row["tpf_effective"], row["accuracy"], row["standard_error"]
        plot.spread(tpf, share - error, share + error, style)
        plot.dot(tpf, share, style, f"k = {row['num_lookahead']}: {100 * share:.1f} %, {tpf:.2f} tokens a pass")
    for place, row in enumerate(rows):
        name = f"k = {row['num_lookahead']}" if place == 0 else str(row["num_lookahead"])
        plot.label(row["tpf_effective"], row["accuracy"], name, style)
    return plot


def steps_panel(title: str, result: dict[str, Any]) -> Plot:
    """The steps of one row."""
    shapes = [shape for shape in result["shapes"] if shape["rows"] == 1]
    widths = [shape["width"] for shape in shapes]
    most = max(shape["device_ms"] for shape in shapes)
    plot = Plot(title, [0, *widths[1::2]], ticks(0, most), "positions in the window", "ms")
    for key, name, style, place in (
        ("device_ms", "a step", "c0", (150, 5.6)),
        ("weight_floor_ms", "weights read once", "c5 dashed", (64, 3.3)),
        ("matrix_floor_ms", "full matrix rate", "c5 dashed", (214, 2.2)),
    ):
        points = [(shape["width"], shape[key]) for shape in shapes]
        plot.line(points, style)
        if key == "device_ms":
            for width, ms in points:
                plot.dot(width, ms, style, f"{width} positions: {ms:.2f} ms")
        plot.label(*place, name, style)
    return plot


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
        (arguments.out / f"results_{theme.name}.svg").write_text(draw(arguments.results, theme), encoding="utf-8")


if __name__ == "__main__":
    main()
