"""Pictures as inline SVG, in plain Python: axes, lines, points, bars, and labels that keep clear of each other.

Colours are classes of the page's style, so that a picture is right on light pages and on dark ones. All lengths are in
the units of the picture, which is as wide as a phone; wider pages scale it.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 380.0, 270.0
NUM_COLOURS = 6
_LEFT, _RIGHT, _TOP, _BOTTOM = 42.0, 12.0, 12.0, 36.0
_LETTER, _LINE = 6.2, 11.0  # about the size of a letter of a label
_ROW, _BAR = 31.0, 12.0  # of a chart of bars, each under its name


def colour(number: int) -> str:
    """The class of the n-th series."""
    return f"c{number % NUM_COLOURS}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers that span a range."""
    if not high > low:
        low, high = low - 0.5, low + 0.5
    rough = (high - low) / max(1, most - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def short(value: float) -> str:
    """A number as an axis says it."""
    return f"{value:.10g}"


@dataclass(slots=True)
class Plot:
    """Axes from tick to tick, and what is drawn into them. x, y: the ticks."""

    title: str
    x: Sequence[float]
    y: Sequence[float]
    x_label: str
    y_label: str
    x_name: Callable[[float], str] = short
    y_name: Callable[[float], str] = short
    _parts: list[str] = field(default_factory=list)
    _taken: list[tuple[float, float, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._taken.append((_LEFT, 0, _LEFT + 4 + len(self.y_label) * _LETTER, _TOP))

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[-1] - self.x[0])
        up = (y - self.y[0]) / (self.y[-1] - self.y[0])
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    def line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        if len(points) > 1:
            ends = [self.at(*point) for point in points]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in ends)
            for (x, y), (to_x, to_y) in itertools.pairwise(ends):
                self._taken += [
                    _around(x + part / 16 * (to_x - x), y + part / 16 * (to_y - y), 1) for part in range(17)
                ]
            self._parts.append(f'<polyline class="line {style}" points="{path}"/>')

    def spread(self, x: float, low: float, high: float, style: str) -> None:
        """An error bar."""
        (at, top), (_, bottom) = self.at(x, high), self.at(x, low)
        self._taken.append((at - 1, top, at + 1, bottom))
        self._parts.append(
            f'<line class="line thin {style}" x1="{at:.1f}" x2="{at:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'
        )

    def dot(self, x: float, y: float, style: str, about: str) -> None:
        """A point; `about` is shown when the pointer is over it."""
        at, up = self.at(x, y)
        self._taken.append(_around(at, up, 4))
        title = f"<title>{html.escape(about)}</title>"
        self._parts.append(f'<circle class="dot {style}" cx="{at:.1f}" cy="{up:.1f}" r="3.6">{title}</circle>')

    def label(self, x: float, y: float, text: str, style: str) -> None:
        """Write a text beside a point, clear of all that is drawn; nothing where there is no room."""
        at, up = self.at(x, y)
        width = len(text) * _LETTER
        places = [
            (at - width / 2, up - 6 - _LINE), (at - width / 2, up + 6), (at + 6, up - _LINE / 2),
            (at - 6 - width, up - _LINE / 2), (at + 4, up - 5 - _LINE), (at - 4 - width, up - 5 - _LINE),
            (at + 4, up + 5), (at - 4 - width, up + 5),
        ]  # fmt: skip
        for left, top in places:
            box = (left, top, left + width, top + _LINE)
            is_inside = left >= _LEFT and box[2] <= WIDTH and top >= 0 and box[3] <= HEIGHT - _BOTTOM
            if is_inside and not any(_overlap(box, other) for other in self._taken):
                self._taken.append(box)
                self._parts.append(
                    f'<text class="label {style}" x="{left:.1f}" y="{top + _LINE - 2:.1f}">{html.escape(text)}</text>'
                )
                return

    def svg(self) -> str:
        return _svg(self.title, HEIGHT, [*self._axes(), *self._parts])

    def _axes(self) -> Iterator[str]:
        for value in self.y:
            _, up = self.at(self.x[0], value)
            yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{up:.1f}" y2="{up:.1f}"/>'
            yield f'<text class="tick end" x="{_LEFT - 5}" y="{up + 3.5:.1f}">{html.escape(self.y_name(value))}</text>'
        for value in self.x:
            at, _ = self.at(value, self.y[0])
            name = html.escape(self.x_name(value))
            yield f'<text class="tick middle" x="{at:.1f}" y="{HEIGHT - _BOTTOM + 13}">{name}</text>'
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        yield f'<text class="axis middle" x="{middle}" y="{HEIGHT - 5}">{html.escape(self.x_label)}</text>'
        yield f'<text class="axis" x="{_LEFT + 4}" y="9">{html.escape(self.y_label)}</text>'


@dataclass(frozen=True, slots=True)
class Bar:
    """parts: (share of the axis, class, what it is); marks: (place, class, what it is), lines across the bar.

    note: after the name, such as the whole's number.
    """

    name: str
    note: str
    parts: Sequence[tuple[float, str, str]]
    marks: Sequence[tuple[float, str, str]] = ()
    start: float = 0.0


def bars(title: str, rows: Sequence[Bar], axis: Sequence[float], axis_name: Callable[[float], str], label: str) -> str:
    """Bars one below the other, each under its name, over one axis from its first tick to its last."""
    height = len(rows) * _ROW + 34
    left, width = 6.0, WIDTH - 12

    def at(value: float) -> float:
        return left + (value - axis[0]) / (axis[-1] - axis[0]) * width

    parts = []
    for value in axis:
        anchor = "start" if value == axis[0] else "end" if value == axis[-1] else "middle"
        parts.append(f'<line class="grid" x1="{at(value):.1f}" x2="{at(value):.1f}" y1="0" y2="{height - 32}"/>')
        parts.append(
            f'<text class="tick {anchor}" x="{at(value):.1f}" y="{height - 19}">{html.escape(axis_name(value))}</text>'
        )
    for place, row in enumerate(rows):
        top = place * _ROW
        most = 58 - len(row.note)
        name = row.name if len(row.name) <= most else f"{row.name[: most - 1]}…"
        parts.append(f'<text class="name" x="{left}" y="{top + 11}">{html.escape(name)}</text>')
        parts.append(f'<text class="name faint end" x="{WIDTH - 6}" y="{top + 11}">{html.escape(row.note)}</text>')
        begin = row.start
        for size, style, about in row.parts:
            span = at(begin + size) - at(begin)
            parts.append(
                f'<rect class="bar {style}" x="{at(begin):.1f}" y="{top + 15:.1f}" width="{max(span, 0):.1f}" '
                f'height="{_BAR}"><title>{html.escape(about)}</title></rect>'
            )
            begin += size
        for value, style, about in row.marks:
            parts.append(
                f'<line class="mark {style}" x1="{at(value):.1f}" x2="{at(value):.1f}" y1="{top + 13}" '
                f'y2="{top + 17 + _BAR}"><title>{html.escape(about)}</title></line>'
            )
    parts.append(f'<text class="axis middle" x="{WIDTH / 2}" y="{height - 4}">{html.escape(label)}</text>')
    return _svg(title, height, parts)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    name = html.escape(title, quote=True)
    inside = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{name}">\n{inside}\n</svg>'


def _around(x: float, y: float, size: float) -> tuple[float, float, float, float]:
    return x - size, y - size, x + size, y + size


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
