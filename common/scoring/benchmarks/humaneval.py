"""HumanEval and HumanEval+: `prompt` is a function's head, `test` defines `check`. As lm-eval's `humaneval`.

HumanEval+ is read in the form of evalplus/humanevalplus: the same fields, with more in `test`.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable

from common.scoring.benchmarks.benchmark import Benchmark, Marks, Row
from common.scoring.programs.isolation import program_scorer
from common.scoring.programs.suites import passes
from common.scoring.programs.text import program_of

TIME_LIMIT_S = 3.0
PLUS_TIME_LIMIT_S = 15.0  # hundreds of inputs, and numpy to load


def _mark_within(time_limit_s: float, *, is_fence_open: bool) -> Callable[[Row, str], Marks]:
    def mark(row: Row, text: str) -> Marks:
        program = program_of(text, row["entry_point"], row["prompt"], is_fence_open=is_fence_open)
        tests = f"{row['test']}\ncheck({row['entry_point']})"
        return {"pass@1": passes(program, tests, time_limit_s)}

    return mark


def _require_name(row: Row) -> None:
    name = row["entry_point"]
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"its `entry_point` {name!r:.100} is no name of a Python function")


def _humaneval(time_limit_s: float, *, is_instruct: bool = False) -> Benchmark:
    def ask(row: Row) -> str:
        if not is_instruct:
            return str(row["prompt"])
        task = "Write a solution to the following problem and make sure that it passes the tests"
        return f"{task}:\n```python\n{row['prompt']}\n```\n"

    def begin(row: Row) -> str:
        return f"Here is the completed function:\n```python\n{row['prompt']}\n" if is_instruct else ""

    return Benchmark(
        fields={"prompt": str, "entry_point": str, "test": str},
        ask=ask,
        begin=begin,
        mark=_mark_within(time_limit_s, is_fence_open=is_instruct),
        require_result=_require_name,
        stop=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
        shot_fields={"canonical_solution": str},
        solve=lambda row: f"{begin(row)}{row['canonical_solution']}\n\n",
        kind=lambda _: "code",
        program=lambda row: f"{row['prompt']}{row['canonical_solution']}",
        scored_by=program_scorer,
    )


HUMANEVAL = _humaneval(TIME_LIMIT_S)
HUMANEVAL_INSTRUCT = _humaneval(TIME_LIMIT_S, is_instruct=True)
HUMANEVAL_PLUS = _humaneval(PLUS_TIME_LIMIT_S)
