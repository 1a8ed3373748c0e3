"""Whether two results of MATH have the same value: by sympy, where it and its LaTeX parser are installed.

Simplifying what a model has written may take for ever and any amount of memory, so it happens in the cell.
"""

from __future__ import annotations

import functools
import importlib.metadata

from common.metrics import isolation, run_program

TIME_LIMIT_S = 10.0  # sympy takes a second to load
_PARSER = "4.11"  # the version of antlr4's runtime that sympy's grammar was made with
_SOURCE = """
def is_same(left, right):
    import sympy
    from sympy.parsing.latex import parse_latex
    return bool(sympy.simplify(parse_latex(left) - parse_latex(right)) == 0)
"""


@functools.cache
def can_compare() -> bool:
    """Whether sympy and the parser that it needs are there: the extra `eval` brings both."""
    try:
        importlib.metadata.version("sympy")
        return importlib.metadata.version("antlr4-python3-runtime").startswith(_PARSER)
    except importlib.metadata.PackageNotFoundError:
        return False


def is_same_value(left: str, right: str) -> bool:
    """False also where one of them cannot be read or the comparison takes too long. Raises NotStarted."""
    return run_program(_SOURCE, "is_same", [[left, right]], isolation().level, TIME_LIMIT_S) == [True]
