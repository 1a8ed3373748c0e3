"""GSM8K: grade-school math, `question` and `answer`, which ends in `#### N`. As lm-eval's `gsm8k`."""

from __future__ import annotations

import re

from common.scoring.benchmarks.benchmark import Benchmark, Marks, Row
from common.scoring.results.numbers import final_number, marked_number

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_IGNORED = re.compile(r"(?s).*#### |[,$]")


def _mark(row: Row, text: str) -> Marks:
    """`number`: what follows the last `####` has the value of the row's, however both are written.
    lm-eval's: `strict-match`, the first number after `#### `, and `flexible-extract`, the last of all, as texts."""
    number, expected = marked_number(row["answer"]), _plain(row["answer"])
    strict, flexible = _STRICT.search(text), _FLEXIBLE.findall(text)
    return {
        "number": final_number(text) == number,
        "strict-match": strict is not None and _plain(strict[1]) == expected,
        "flexible-extract": bool(flexible) and _plain(flexible[-1]) == expected,
    }


def _plain(number: str) -> str:
    return _IGNORED.sub("", number).strip().removesuffix(".").lower()


GSM8K = Benchmark(
    fields={"question": str, "answer": str},
    ask=lambda row: f"Question: {row['question']}\nAnswer:",
    mark=_mark,
    require_result=lambda row: marked_number(row["answer"]),
    stop=("Question:", "</s>", "<|im_end|>"),
    shot_fields={},
    solve=lambda row: f" {row['answer']}\n\n",
    num_fewshot=5,
)
