"""The house stands: no module imports itself by a detour, rooms show what others may use, and folders fit on a page."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("common", "graphs", "quant", "lopa_ascend", "lopa_cuda")
MOST_IN_A_FOLDER = 14


@cache
def modules() -> dict[str, Path]:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {name_of(path): path for path in paths}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Return every module that a file names in an import: at the top, in functions, and for type checkers alike."""
    return tuple(_named(path))


def _named(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph() -> dict[str, set[str]]:
    """Module -> modules. A package that a module lies in is no neighbour: Python loads it first anyway."""
    known = modules()
    return {
        name: {other for other in imported(path) if other in known and not f"{name}.".startswith(f"{other}.")}
        for name, path in known.items()
    }


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Some circle, empty if there is none: what is left when modules without neighbours are taken away again and again
    lies on one or leads to one."""
    left = {name: set(others) for name, others in edges.items()}
    while ended := [name for name, others in left.items() if not others & left.keys()]:
        for name in ended:
            del left[name]
    path: list[str] = []
    name = min(left, default="")
    while left and name not in path:
        path.append(name)
        name = min(left[name] & left.keys())
    return path[path.index(name) :] if path else []


def test_no_module_imports_itself_by_a_detour() -> None:
    assert not circle(graph())


def test_a_circle_would_be_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]


@pytest.mark.parametrize("room", sorted(path.parent.name for path in (ROOT / "common").glob("*/__init__.py")))
def test_others_use_a_room_by_its_door(room: str) -> None:
    """What other rooms and engines need of a room stands in its `__init__`; `commands` is used by nobody."""
    inside = f"common.{room}"
    known = modules()
    for name, path in known.items():
        if name == inside or name.startswith(f"{inside}."):
            continue
        through_walls = [other for other in imported(path) if other in known and other.startswith(f"{inside}.")]
        allowed = {f"{inside}.main"} if name.startswith("common.commands") else set()
        assert set(through_walls) <= allowed | set(re_exported(inside)), f"{name} imports {through_walls}"


def re_exported(package: str) -> list[str]:
    """`from common.bench import estimate` names a module by its room, which is the door too."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    return [
        f"{package}.{alias.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    ]


@pytest.mark.parametrize("folder", sorted({path.parent for path in modules().values()}), ids=name_of)
def test_a_folder_is_taken_in_at_a_glance(folder: Path) -> None:
    names = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(names) <= MOST_IN_A_FOLDER, f"{name_of(folder)} holds {len(names)} modules: give some a room"


@pytest.mark.parametrize("package", [p for name, p in modules().items() if p.name == "__init__.py"], ids=name_of)
def test_every_package_says_what_it_is_for(package: Path) -> None:
    assert ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))), f"{package} has no docstring"
