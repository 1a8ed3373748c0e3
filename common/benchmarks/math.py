"""MATH (Hendrycks 2021): `problem`, and `solution` with its result in a \\boxed{}. As lm-eval's `minerva_math`."""

from __future__ import annotations

import re

from common.benchmarks.benchmark import Benchmark, Marks, Row
from common.benchmarks.latex import boxed, normalized
from common.benchmarks.symbolic import can_compare, is_same_value

_FINAL = re.compile(r"Final Answer: The final answer is(.*?). I hope it is correct.")


def _mark(row: Row, text: str) -> Marks:
    """`final-answer`: what the sentence of the shots says, else the last \\boxed{}, is the same once normalized.
    `minerva`: only the sentence counts. With sympy, equal values count in both."""
    expected = _expected(row)
    stated = _FINAL.search(text + "I hope it is correct.")
    said = stated[1].strip() if stated else None
    is_stated = said is not None and _is_same(said, expected)
    concluded = boxed(text) if said is None else None
    is_concluded = concluded is not None and _is_same(concluded, expected)
    return {"final-answer": is_stated or is_concluded, "minerva": is_stated}


def _expected(row: Row) -> str:
    expected = boxed(row["solution"])
    if expected is None:
        raise ValueError("its `solution` has no \\boxed{}, the result that answers are compared with")
    return expected


def _is_same(one: str, other: str) -> bool:
    left, right = normalized(one), normalized(other)
    if left == right:
        return bool(left)
    return can_compare() and is_same_value(left, right)


def _kind(row: Row) -> str:
    return row["type"] if isinstance(row.get("type"), str) else ""


MATH = Benchmark(
    fields={"problem": str, "solution": str},
    ask=lambda row: f"Problem:\n{row['problem']}\n\nSolution:",
    mark=_mark,
    require_result=_expected,
    stop=("Problem:",),
    shot_fields={},
    solve=lambda row: f" {row['solution']}\n\n",
    num_fewshot=4,
    own_shots="math.jsonl",
    kind=_kind,
)
