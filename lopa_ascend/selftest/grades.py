"""How far a result may be from its twin's, in three grades. Only the last one says that an operator is useless.

scripts/lab/ascend_evidence.md has the limits as a table. A step of bfloat16 is 2^-7 of the value's size plus the
results' root mean square: small values beside large ones are judged by the large. Integers other than int8 are sums,
which nobody rounds: they are equal or wrong. So is what is not finite, or comes back in another shape or dtype.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from graphs.cann import said_by_cann, told

STEP = 2.0**-7
FLOAT32 = 1e-5
ATTENTION_SAME, ATTENTION_WRONG = 4e-3, 3e-2
_INT8_TIES, _FLOAT_TIES = 1e-3, 1e-2  # shares of the elements
_MOST_TOLD = 300  # characters of an error
# What a call raises that this release, or its libraries, do not have or refuse; OSError: ATB's operators without nnal.
FAILURES = (RuntimeError, TypeError, AttributeError, ImportError, OSError)


class Grade(IntEnum):
    SAME = 0
    ROUNDS_DIFFERENTLY = 1
    WRONG = 2


class Verdict(NamedTuple):
    """detail: the largest difference, or what is wrong."""

    grade: Grade
    detail: str


def failed(error: BaseException) -> Verdict:
    """Return the verdict on a call that has raised: what CANN says, else the error's beginning."""
    said = str(error) if said_by_cann(error) is None else told(error)
    return Verdict(Grade.WRONG, " ".join(said.split())[:_MOST_TOLD])


def compare(found: list[Tensor], wanted: list[Tensor], *, is_attention: bool = False) -> Verdict:
    """The worst grade of all results, and what was seen of each."""
    verdicts = [_verdict(have, want, is_attention) for have, want in zip(found, wanted, strict=True)]
    worst = max(verdict.grade for verdict in verdicts)
    told = [verdict.detail for verdict in verdicts if worst != Grade.WRONG or verdict.grade == worst]
    return Verdict(worst, ", ".join(dict.fromkeys(told)))


def _verdict(have: Tensor, want: Tensor, is_attention: bool) -> Verdict:
    if have.shape != want.shape or have.dtype != want.dtype:
        return Verdict(Grade.WRONG, f"{have.dtype}{list(have.shape)} came back")
    if have.dtype == torch.int8:
        return _of_int8(have, want)
    if not have.dtype.is_floating_point:
        num_wrong = int((have != want).sum())
        return Verdict(Grade.WRONG, f"{num_wrong} of {have.numel()} integers differ") if num_wrong else _EQUAL
    if not bool(have.isfinite().all()):
        return Verdict(Grade.WRONG, "the result is not finite")
    if torch.equal(have, want):
        return _EQUAL
    return _of_attention(have, want) if is_attention else _of_floats(have, want)


_EQUAL = Verdict(Grade.SAME, "equal")


def _of_int8(have: Tensor, want: Tensor) -> Verdict:
    difference = (have.int() - want.int()).abs()
    most, share = int(difference.max()), float((difference > 0).float().mean())
    grade = Grade.WRONG if most > 1 else Grade.ROUNDS_DIFFERENTLY if share > _INT8_TIES else Grade.SAME
    return Verdict(grade, f"int8 off by {most} in {share:.3%}" if most else "equal")


def _of_floats(have: Tensor, want: Tensor) -> Verdict:
    exact = want.double()
    size = exact.abs() + exact.square().mean().sqrt()
    most = float((have.double() - exact).abs().div(size).max()) / STEP
    share = float((have != want).float().mean())
    if have.dtype == torch.float32:
        is_same = most * STEP <= FLOAT32
        detail = f"off by {most * STEP:.1e} of the size"
    else:
        is_same = share <= _FLOAT_TIES
        detail = f"off by {most:.2f} steps in {share:.2%}"
    grade = Grade.WRONG if most > 1 else Grade.SAME if is_same else Grade.ROUNDS_DIFFERENTLY
    return Verdict(grade, detail)


def _of_attention(have: Tensor, want: Tensor) -> Verdict:
    difference = (have.double() - want.double()).abs()
    most, size = float(difference.max()), want.double().abs() + want.double().square().mean().sqrt()
    excess = float((difference - ATTENTION_SAME).clamp(min=0).div(size).max())
    is_same = excess <= STEP and most <= ATTENTION_WRONG
    grade = Grade.SAME if is_same else Grade.WRONG if most > ATTENTION_WRONG else Grade.ROUNDS_DIFFERENTLY
    return Verdict(grade, f"off by {most:.1e}")
