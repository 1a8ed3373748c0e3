"""MBPP and MBPP+: a task in words and three assertions, all shown in the prompt. As lm-eval's `mbpp` and `mbpp_plus`.

MBPP is asked for its test split, task_id 11 to 510, whatever else the file holds. MBPP+ is read in the form of
evalplus/mbppplus, whose `test` is a whole program of assertions; lm-eval's `mbpp_plus` runs the three of `test_list`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace

from common.scoring.benchmarks.benchmark import Benchmark, Marks, Row
from common.scoring.programs.isolation import program_scorer
from common.scoring.programs.suites import passes
from common.scoring.programs.text import program_of

TIME_LIMIT_S = 3.0
PLUS_TIME_LIMIT_S = 15.0
_FIRST_TEST, _LAST_TEST = 11, 510
_NUM_SHOWN = 3
_DONE = "[DONE]"
_BEGUN = re.compile(r"(?m)^[ \t>]*\[BEGIN\][ \t]*$")
_CALL = re.compile(r"\b([A-Za-z_]\w*)\s*\(")


def _ask(row: Row) -> str:
    task = row["text"] if "text" in row else row["prompt"]
    shown = "\n".join(row["test_list"][:_NUM_SHOWN])
    return (
        f"You are an expert Python programmer, and here is your task: {task} Your code should pass these tests:\n\n"
        f"{shown}\n[BEGIN]\n"
    )


def _program(row: Row, text: str) -> str:
    """Return the program of an answer, which may still have the prompt's marks around it."""
    name = entry_point(row)
    program = program_of(_BEGUN.sub("", text.split(_DONE, 1)[0]), name)
    return program if name in program else program_of(_BEGUN.sub("", text.replace(_DONE, "")), name)


def _mark(row: Row, text: str) -> Marks:
    parts = [row.get("test_setup_code", ""), *row["test_list"]]
    return {"pass@1": passes(_program(row, text), "\n".join(parts), TIME_LIMIT_S)}


def _mark_plus(row: Row, text: str) -> Marks:
    return {"pass@1": passes(_program(row, text), row["test"], PLUS_TIME_LIMIT_S)}


def entry_point(row: Row) -> str:
    """The function that the first assertion calls and the reference defines. Raises ValueError where there is none."""
    called = _CALL.findall(row["test_list"][0]) if row["test_list"] else []
    defined = _definitions(row["code"]) if isinstance(row.get("code"), str) else set(called)
    name: str | None = next((name for name in called if name in defined), None)
    if name is None:
        raise ValueError("the first assertion of its `test_list` calls no function of its `code`")
    return name


def _definitions(code: str) -> set[str]:
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return set()
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def _is_test(row: Row) -> bool:
    return not isinstance(row.get("task_id"), int) or _FIRST_TEST <= row["task_id"] <= _LAST_TEST


MBPP = Benchmark(
    fields={"text": str, "code": str, "test_list": list},
    ask=_ask,
    mark=_mark,
    require_result=entry_point,
    stop=(_DONE,),
    shot_fields={},
    solve=lambda row: f"{row['code']}\n{_DONE}\n\n",
    num_fewshot=3,
    own_shots="mbpp.jsonl",
    kind=lambda _: "code",
    is_test=_is_test,
    program=lambda row: str(row["code"]),
    scored_by=program_scorer,
)
MBPP_PLUS = replace(
    MBPP,
    fields={"prompt": str, "code": str, "test_list": list, "test": str},
    mark=_mark_plus,
    shot_fields={"text": str, "code": str, "test_list": list},
    is_test=bool,
)
