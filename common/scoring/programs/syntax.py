"""Is a text a Python program, and where does it stop to be one? Nothing is run."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from functools import lru_cache

_MOST_CHARACTERS = 50_000
_STATEMENTS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.ExceptHandler, ast.Match, ast.match_case)


@lru_cache(16)  # an end of a block is looked at more than once
def parsed(code: str) -> ast.Module | int:
    """Return the tree of a program, else the number of the line where it goes wrong, 0 where nobody can tell."""
    if len(code) > _MOST_CHARACTERS:
        return 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except SyntaxError as error:
        return error.lineno or 0
    except (ValueError, RecursionError, MemoryError):
        return 0


def is_program(code: str) -> bool:
    """Whether the code parses, also as the body of a function with `return` outside of any."""
    return isinstance(parsed(code), ast.Module)


def wrong_line(code: str) -> int | None:
    """Return the number of the line where a text stops to be a whole program, None if it is one; 0 where nobody can
    tell."""
    tree = parsed(code)
    if isinstance(tree, int):
        return tree
    return min(_stray_returns(tree), default=None)


def _stray_returns(node: ast.AST) -> Iterator[int]:
    """Lines of `return` outside of any function, at any depth."""
    nodes = [node]
    while nodes:
        for inner in ast.iter_child_nodes(nodes.pop()):
            if isinstance(inner, ast.Return):
                yield inner.lineno
            elif isinstance(inner, _STATEMENTS):
                nodes.append(inner)


def dedented(code: str) -> str:
    """Remove the indentation that all lines share, or where text in quotes has less, the first line's."""
    shared = textwrap.dedent(code)
    if is_program(shared):
        return shared
    first = re.match(r"(?:[ \t]*\n)*([ \t]*)", code)
    width = len(first[1]) if first is not None else 0
    by_first = re.sub(rf"(?m)^[ \t]{{0,{width}}}", "", code)
    return by_first if width and is_program(by_first) else shared
