"""Is an answer right by the result that comes with its problem? Math by its final number, code by running it on fixed
inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from common.scoring.programs.isolation import isolation
from common.scoring.programs.run import Level, run_program
from common.scoring.programs.text import program_of
from common.scoring.results.numbers import final_number, marked_number, read_number
from common.text import answer_of


def score_math(text: str, final: object) -> bool:
    """Whether the number that a text ends with has the value of `final`. Raises ValueError for a `final` that is no
    number, whatever the text is."""
    expected = _number(final)
    return final_number(text) == expected


def score_code(text: str, problem: Mapping[str, Any], level: Level | None = None) -> bool:
    """Whether `entry_point` yields `expected` on every one of `inputs` (lists of positional arguments).

    level: how the program is confined, `isolation()` unless given. Raises ValueError for a problem that no program
    could solve, NotStarted where no program can be run, and ConfigError as `isolation()` does.
    """
    _check_code(problem)
    program = program_of(text, problem["entry_point"])
    values = run_program(program, problem["entry_point"], problem["inputs"], level or isolation())
    return values is not None and _is_same(values, problem["expected"])


def score(problem: Mapping[str, Any], text: str) -> bool:
    """Score by `kind`; a problem without one is math, its result in `final` or after the `####` of its `answer`.

    Raises ValueError, with the reason, for a problem that answers cannot be compared with.
    """
    text = answer_of(text)
    if problem.get("kind", "math") == "code":
        return score_code(text, problem)
    return score_math(text, problem["final"] if "final" in problem else marked_number(problem["answer"]))


def _number(final: object) -> Fraction:
    number = read_number(str(final)) if isinstance(final, (str, int, float, Fraction)) else None
    if number is None:
        raise ValueError(f"`final` is no number: {final!r:.100}")
    return number


def _check_code(problem: Mapping[str, Any]) -> None:
    inputs, expected = problem["inputs"], problem["expected"]
    if not isinstance(problem["entry_point"], str):
        raise ValueError(f"`entry_point` is no name: {problem['entry_point']!r:.100}")
    if not isinstance(inputs, list) or not all(isinstance(arguments, list) for arguments in inputs):
        raise ValueError(f"`inputs` is no list of lists of arguments: {inputs!r:.100}")
    if not isinstance(expected, list) or len(expected) != len(inputs) or not inputs:
        raise ValueError(f"`expected` is no list with a result for each of {len(inputs)} inputs: {expected!r:.100}")


def _is_same(left: object, right: object) -> bool:
    """Whether two JSON values are equal in value and type, all the way down: True is not 1, and 2.0 is not 2."""
    pairs = [(left, right)]
    while pairs:
        one, other = pairs.pop()
        if type(one) is not type(other):
            return False
        if isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            pairs += zip(one, other, strict=True)
        elif isinstance(one, dict) and isinstance(other, dict):
            if one.keys() != other.keys():
                return False
            pairs += [(one[key], other[key]) for key in one]
        elif one != other:
            return False
    return True
