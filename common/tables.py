"""Format tables that are aligned as text and valid as Markdown, and write counts in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from common.errors import harmless

_SIGNS = re.compile(r"([\\`*\[\]|])")  # that Markdown would read


def counted(number: int, what: str, ending: str = "s") -> str:
    """Write a count: 1 pass, 2 passes."""
    return f"{number} {what}{'' if number == 1 else ending}"


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], *, is_aligned: bool = True) -> str:
    """Return a table whatever its cells hold. is_aligned: columns are as wide as their widest cell."""
    cells = [[_escaped(" ".join(cell.split())) for cell in row] for row in (headings, *rows)]
    widths = [max(4, *map(len, column)) if is_aligned else 0 for column in zip(*cells, strict=True)]
    ruler = ["-" * max(3, width - (place > 0)) + ":" * (place > 0) for place, width in enumerate(widths)]
    lines = [
        [cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in (cells[0], ruler, *cells[1:])
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(cell: str) -> str:
    return harmless(_SIGNS.sub(r"\\\1", cell)).replace("<", "&lt;")
