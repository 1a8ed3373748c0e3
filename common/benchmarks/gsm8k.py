"""GSM8K: grade-school math, `question` and `answer`, which ends in `#### N`. As lm-eval's `gsm8k`."""

from __future__ import annotations

import re

from common.benchmarks.benchmark import Benchmark, Marks, Row

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_IGNORED = re.compile(r"(?s).*#### |[,$]")


def _mark(row: Row, text: str) -> Marks:
    """`strict-match`: the number behind the first `####`; `flexible-extract`: the last number of all."""
    expected = _expected(row)
    strict, flexible = _STRICT.search(text), _FLEXIBLE.findall(text)
    return {
        "strict-match": strict is not None and _plain(strict[1]) == expected,
        "flexible-extract": bool(flexible) and _plain(flexible[-1]) == expected,
    }


def _expected(row: Row) -> str:
    if not _STRICT.search(row["answer"]):
        raise ValueError("its `answer` has no '#### N', the number that answers are compared with")
    return _plain(row["answer"])


def _plain(number: str) -> str:
    return _IGNORED.sub("", number).strip().removesuffix(".").lower()


GSM8K = Benchmark(
    fields={"question": str, "answer": str},
    ask=lambda row: f"Question: {row['question']}\nAnswer:",
    mark=_mark,
    require_result=_expected,
    stop=("Question:", "</s>", "<|im_end|>"),
    shot_fields={},
    solve=lambda row: f" {row['answer']}\n\n",
    num_fewshot=5,
)
