"""Draw which rooms use which, from the imports of the code, into docs/architecture.md.

python scripts/draw_rooms.py

A room is a folder or a module right inside `common`, or one of the other packages. An arrow that follows from others is
left out, so that a room is drawn above all that it reaches.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("lopa_ascend", "lopa_cuda", "common", "graphs", "quant")
_BLOCK = re.compile(r"(<!-- rooms -->\n).*?(<!-- end -->)", re.DOTALL)


def room_of(module: str) -> str | None:
    """Return the room that a dotted name lies in; None for what is not of this project."""
    package, _, rest = module.partition(".")
    if package not in PACKAGES:
        return None
    return rest.partition(".")[0] or None if package == "common" else package


def uses() -> dict[str, set[str]]:
    """Return the other rooms that each room imports."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
            if room is not None and room != "__init__":
                found.setdefault(room, set()).update(_imported(path) - {room})
    return {room: used & found.keys() for room, used in found.items()}


def _imported(path: Path) -> set[str | None]:
    rooms: set[str | None] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            rooms |= {room_of(name.name) for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "common":
            rooms |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            rooms.add(room_of(node.module))
    return rooms


def drawing(rooms: Mapping[str, set[str]]) -> str:
    """Return a Mermaid drawing. Raises ValueError for rooms that use each other in a circle."""
    reached = {room: _reached(rooms, room, ()) for room in rooms}
    lines = []
    for room in sorted(rooms, key=lambda room: (-len(reached[room]), room)):
        direct = {other for other in rooms[room] if not any(other in reached[third] for third in rooms[room])}
        if direct:
            lines.append(f"    {room} --> {' & '.join(sorted(direct))}")
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```", ""])


def _reached(rooms: Mapping[str, set[str]], room: str, above: tuple[str, ...]) -> set[str]:
    if room in above:
        raise ValueError(f"rooms use each other in a circle: {' -> '.join([*above, room])}")
    return rooms[room].union(*(_reached(rooms, other, (*above, room)) for other in rooms[room]))


def with_drawing(page: str, drawn: str) -> str:
    return _BLOCK.sub(lambda mark: f"{mark[1]}{drawn}{mark[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_drawing(PAGE.read_text(encoding="utf-8"), drawing(uses())), encoding="utf-8")
