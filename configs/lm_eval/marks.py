"""What the task files beside this one take from here: rules and cell of `common.scoring`, and its rows of MBPP."""

from __future__ import annotations

import json
from typing import Any

from common.config import fewshot_file
from common.scoring import BENCHMARKS


def humaneval(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"pass_at_1": float(BENCHMARKS["humaneval"].mark(doc, results[0])["pass@1"])}


def mbpp(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"pass_at_1": float(BENCHMARKS["mbpp"].mark(doc, results[0])["pass@1"])}


def test_split_of_mbpp(dataset: Any) -> Any:
    return dataset.filter(BENCHMARKS["mbpp"].is_test)


def shots_of_mbpp() -> list[dict[str, Any]]:
    with fewshot_file("mbpp.jsonl").open(encoding="utf-8") as rows:
        return [json.loads(row) for row in rows]
