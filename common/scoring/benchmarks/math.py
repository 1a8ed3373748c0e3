"""MATH (Hendrycks 2021): `problem`, and `solution` with its result in a \\boxed{}. As lm-eval's `minerva_math`.

`math` compares values by sympy too, `math_plain` needs no library.
"""

from __future__ import annotations

import re
from dataclasses import replace

from common.scoring.benchmarks.benchmark import Benchmark, Marks, Row
from common.scoring.results.expressions import Same, is_same_result
from common.scoring.results.latex import boxed
from common.scoring.results.symbolic import comparison, is_same_value

_FINAL = re.compile(r"Final Answer: The final answer is(.*?). I hope it is correct.")


def _mark(row: Row, text: str, has_same_value: Same) -> Marks:
    """`final-answer`: what the sentence of the shots says, else the last \\boxed{}, is the row's result.
    `minerva`: only the sentence counts."""
    expected = _expected(row)
    stated = _FINAL.search(text + "I hope it is correct.")
    said = stated[1].strip() if stated else None
    is_stated = said is not None and is_same_result(said, expected, has_same_value)
    concluded = boxed(text) if said is None else None
    is_concluded = concluded is not None and is_same_result(concluded, expected, has_same_value)
    return {"final-answer": is_stated or is_concluded, "minerva": is_stated}


def _expected(row: Row) -> str:
    expected = boxed(row["solution"])
    if expected is None:
        raise ValueError("its `solution` has no \\boxed{}, the result that answers are compared with")
    return expected


def _kind(row: Row) -> str:
    return row["type"] if isinstance(row.get("type"), str) else ""


MATH = Benchmark(
    fields={"problem": str, "solution": str},
    ask=lambda row: f"Problem:\n{row['problem']}\n\nSolution:",
    mark=lambda row, text: _mark(row, text, is_same_value),
    scored_by=comparison,
    require_result=_expected,
    stop=("Problem:",),
    shot_fields={},
    solve=lambda row: f" {row['solution']}\n\n",
    num_fewshot=4,
    own_shots="math.jsonl",
    kind=_kind,
)
MATH_PLAIN = replace(
    MATH, mark=lambda row, text: _mark(row, text, lambda *_: False), scored_by=lambda: "texts and numbers"
)
