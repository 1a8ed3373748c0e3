"""Are two results of MATH the same? As texts in Minerva's normal form, as numbers, and piece by piece."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from common.scoring.results.latex import normalized
from common.scoring.results.numbers import plain, whole_number

Same = Callable[[str, str], bool]

_MOST_CHARACTERS = 400  # results are shorter, and the normal form takes the square of their length
_TIDIED = (
    (re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?|\\displaystyle(?![A-Za-z])|\\[()\[\]]"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"\\frac\s*(\{[^{}]*\}|\d)\s*(\d)"), r"\\frac\1{\2}"),
    (re.compile(r"\\frac(\d)\{"), r"\\frac{\1}{"),
    (re.compile(r"\\(?:textbf|textrm|textit|textnormal|mathbf|mathrm|mbox|operatorname)(?=\s*\{)"), r"\\text"),
    (re.compile(r"\\q?quad(?![A-Za-z])"), " "),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|°|\\degrees?(?![A-Za-z])"), ""),
    (re.compile(r"(?<=[\d}])\s*\\?%"), ""),
    (re.compile(r"(?<=\d) (?=\d{3}(?!\d))"), ""),
)
_APART = re.compile(r"(?<=\d)\s+(?=\d)")  # two numbers, of which the normal form would make one
_ENDS = re.compile(r"^[\s$]+|[\s$.,;:]+$")
_PLUS = re.compile(r"^\+(?=[\d.\\$])")
_UNIT = re.compile(r"(?P<value>.*[\d}])\s*\\text\s*\{\s*(?P<unit>[^{}]*?)[\s.]*\}(?:\s*\^\s*\{?\d\}?)?")
_SCALES = re.compile(r"\b(?:hundred|thousand|million|billion|trillion|base|mod|or|and|to)\b")
_WORDS = re.compile(r"\\text\s*\{[^{}]*[A-Za-z]|(?<![\\A-Za-z])[A-Za-z]{3}")  # of which sympy makes products
_SEVERAL = re.compile(r"=.*?(?:,|;|\\text\s*\{\s*(?:and|or)|\\(?:quad|qquad)|\b(?:and|or)\b).*=", re.DOTALL)
_IN_BRACKETS = re.compile(r"(\\?[(\[{])(.*)(\\?[)\]}])", re.DOTALL)


def is_same_result(one: str, other: str, has_same_value: Same) -> bool:
    """Compare two results. has_same_value: asked about expressions in normal form that are neither words nor both
    numbers."""
    if max(len(one), len(other)) > _MOST_CHARACTERS:
        return one.strip() == other.strip()
    one, other = _tidied(one), _tidied(other)
    left, right = _UNIT.fullmatch(one), _UNIT.fullmatch(other)
    if left is not None and right is not None and left["unit"] != right["unit"]:
        return False
    values = [
        text if unit is None or _SCALES.search(unit["unit"]) else unit["value"]
        for text, unit in ((one, left), (other, right))
    ]
    return _is_same(values[0], values[1], has_same_value)


def _is_same(one: str, other: str, has_same_value: Same) -> bool:
    if _SEVERAL.search(one) or _SEVERAL.search(other):  # what follows the last "=" is not all of it
        return one.replace(" ", "") == other.replace(" ", "")
    number, other_number = _number(one), _number(other)
    if number is not None and other_number is not None:
        return number == other_number
    left, right = (normalized(_APART.sub("|", text)) for text in (one, other))
    if left == right:
        return bool(left)
    (brackets, pieces), (other_brackets, other_pieces) = _pieces(one), _pieces(other)
    if len(pieces) > 1 or len(other_pieces) > 1:
        pairs = zip(pieces, other_pieces, strict=False)
        return (brackets, len(pieces)) == (other_brackets, len(other_pieces)) and all(
            _is_same(piece, other_piece, has_same_value) for piece, other_piece in pairs
        )
    is_expression = not any(_WORDS.search(text) or _APART.search(text) for text in (one, other))
    return bool(left and right) and is_expression and has_same_value(left, right)


def _tidied(result: str) -> str:
    """Write the same markup for the same thing; leave out units, signs and ends of sentences that change nothing."""
    result = plain(result)
    for pattern, written in _TIDIED:
        result = pattern.sub(written, result)
    return _PLUS.sub("", _ENDS.sub("", result))


def _number(result: str) -> Fraction | None:
    number = whole_number(result)
    return whole_number(normalized(_APART.sub("|", result))) if number is None else number


def _pieces(result: str) -> tuple[str, list[str]]:
    """Return the brackets around a result and what stands between its commas, in order."""
    found = _IN_BRACKETS.fullmatch(result.strip())
    brackets, inner = (found[1] + found[3], found[2]) if found is not None else ("", result)
    pieces, depth = [""], 0
    for letter in inner:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += letter
    return brackets, [piece.strip() for piece in pieces]
