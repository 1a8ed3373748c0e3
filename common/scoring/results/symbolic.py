"""Whether two results of MATH have the same value: by sympy and its LaTeX parser, of the extra `eval`.

Simplifying what a model has written may take for ever and any amount of memory, so it happens in the cell, within its
limits: what runs is the program below, not a model's.
"""

from __future__ import annotations

import re
from importlib import metadata

from common.errors import ConfigError
from common.scoring.programs.isolation import strongest
from common.scoring.programs.run import library_folders, run_program

TIME_LIMIT_S = 10.0  # sympy takes a second to load
_NEEDED = (
    ("sympy", r"1\.(?:1[3-9]|[2-9]\d)\b|[2-9]", "1.13 or later"),  # the first that can be told to read all of a text
    ("antlr4-python3-runtime", r"4\.11\b", "4.11"),  # what sympy's grammar was made with
)
_SOURCE = """
def is_same(left, right):
    import sympy
    from sympy.parsing.latex import parse_latex
    left, right = parse_latex(left, strict=True), parse_latex(right, strict=True)
    return bool(sympy.simplify(left - right) == 0)
"""


def comparison() -> str:
    """Return what compares, with versions. Raises ConfigError where this machine lacks it."""
    found = {name: _version(name) for name, _, _ in _NEEDED}
    wrong = [
        f"{name} {wanted}, {'none' if found[name] is None else found[name]} is installed"
        for name, pattern, wanted in _NEEDED
        if re.match(pattern, found[name] or "") is None
    ]
    if wrong:
        raise ConfigError(
            f"input.benchmark: math compares results by value, which needs {' and '.join(wrong)}: run pip install "
            "'lopa[eval]', or set input.benchmark to math_plain, which compares them as texts and numbers"
        )
    return ", ".join(f"{name} {version}" for name, version in found.items())


def is_same_value(left: str, right: str) -> bool:
    """Whether the values are the same; False also where one cannot be read or it takes too long. Raises NotStarted."""
    return run_program(_SOURCE, "is_same", [[left, right]], strongest(), TIME_LIMIT_S) == [True]


def _version(name: str) -> str | None:
    """Return the version that the cell finds, which looks into the interpreter's own folders only."""
    found = next(iter(metadata.distributions(name=name, path=library_folders())), None)
    return None if found is None else found.version
