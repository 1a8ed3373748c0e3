"""Format tables that are aligned as text and valid as Markdown, and write counts in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(number: int, what: str, ending: str = "s") -> str:
    """Write a count: 1 pass, 2 passes."""
    return f"{number} {what}{'' if number == 1 else ending}"


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that is aligned as text and valid as Markdown."""
    cells = [list(headings), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    lines = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
             for row in cells]  # fmt: skip
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
