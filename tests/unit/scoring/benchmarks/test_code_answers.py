"""HumanEval and MBPP: from an answer to a program, and from the program to right or wrong."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.scoring.benchmarks.mbpp import entry_point
from common.scoring.benchmarks.task import BENCHMARKS
from common.scoring.programs.text import program_of

# HumanEval/23 of openai/human-eval (MIT), with a helper and an import added.
HEAD = 'import math\n\ndef helper(x):\n    return x\n\n\ndef strlen(string: str) -> int:\n    """ Return length. """\n'
HUMANEVAL = {
    "task_id": "HumanEval/23",
    "prompt": HEAD,
    "entry_point": "strlen",
    "canonical_solution": "    return len(string)\n",
    "test": "def check(candidate):\n    assert candidate('') == helper(0)\n    assert candidate('asdasnakj') == 9\n",
}
# A row of google-research/mbpp (CC BY 4.0).
MBPP: dict[str, Any] = {
    "task_id": 17,
    "text": "Write a function to find the perimeter of a square.",
    "code": "def square_perimeter(a):\r\n  perimeter=4*a\r\n  return perimeter",
    "test_setup_code": "",
    "test_list": [
        "assert square_perimeter(10)==40",
        "assert square_perimeter(5)==20",
        "assert square_perimeter(4)==16",
    ],
}
MBPP_PLUS = {
    "task_id": 17,
    "prompt": MBPP["text"],
    "code": MBPP["code"],
    "test_list": MBPP["test_list"],
    "test": "inputs = [[10], [0]]\nresults = [40, 0]\nfor inp, exp in zip(inputs, results):\n"
    "    assert square_perimeter(*inp) == exp\n",
}
BODY = "    return len(string)\n"
WHOLE = "def strlen(string):\n    return len(string)\n"


@pytest.mark.parametrize(
    "text",
    [
        BODY,
        BODY + "\nThat is all, is it not?",
        BODY + "```\nIt counts the letters.",
        BODY + "\ndef half_of_ano",
        WHOLE,
        f"Here it is:\n```python\n{WHOLE}```\nDone.",
        f"First:\n```python\nprint(1)\n```\nThen:\n```python\n{WHOLE}```",
        f"```py\n{HEAD}{BODY}",
        f"Sure, I can.\n\n{WHOLE}\nIt counts.",
    ],
)
def test_the_program_is_found_in_an_answer(text: str) -> None:
    program = program_of(text, "strlen", HEAD)
    ast.parse(program)
    names: dict[str, Any] = {}
    exec(program, names)  # this file's own programs
    assert names["strlen"]("abc") == 3 and names["helper"](1) == 1


def test_an_open_block_ends_at_its_fence() -> None:
    text = f"{BODY}```\nOr else:\n```python\ndef strlen(s): return 0\n```"
    assert program_of(text, "strlen", HEAD, is_fence_open=True) == HEAD + BODY


def test_without_a_prompt_the_longest_span_that_defines_the_entry_point_is_taken() -> None:
    program = "x = 1\nimport math\ndef f(n):\n    return math.floor(n)"
    assert program_of(f"I think\nx = 1\nimport math, \n{program}\nis right\ndef f(n): return 0\n", "f") == program
    assert program_of("no program at all", "f") == "no program at all"


@settings(max_examples=80)
@given(st.text(alphabet=st.sampled_from("`\n python()[]def f:=\\'\"#\0ä"), max_size=80))
def test_any_text_makes_a_program(text: str) -> None:
    assert isinstance(program_of(text, "f"), str)
    assert program_of(text, "f", "def f():\n").startswith("def f():\n")


@pytest.mark.parametrize(
    "text",
    ["(" * 20_000, "-" * 40_000 + "1", "[" * 5_000 + "]" * 5_000, "x = 1\n" * 30_000, "def f(:\n" * 3_000, "```" * 9],
)
def test_text_that_parsers_dislike_ends_nothing(text: str) -> None:
    assert isinstance(program_of(text, "f", "def f():\n"), str)
    assert isinstance(program_of(text, "f"), str)


@pytest.mark.parametrize(
    ("name", "row", "text", "is_right"),
    [
        ("humaneval", HUMANEVAL, BODY, True),
        ("humaneval", HUMANEVAL, "    return 9\n", False),
        ("humaneval", HUMANEVAL, "    import os; os._exit(0)\n", False),
        ("humaneval", HUMANEVAL, "", False),
        ("humaneval_instruct", HUMANEVAL, f"{BODY}```\nThis works.", True),
        ("humaneval_plus", HUMANEVAL, f"```python\n{WHOLE}```", True),
        ("mbpp", MBPP, MBPP["code"], True),
        ("mbpp", MBPP, "def square_perimeter(a):\n    return 40\n", False),
        (
            "mbpp",
            {**MBPP, "test_setup_code": "def four(): return 4"},
            "def square_perimeter(a): return four() * a",
            True,
        ),
        ("mbpp_plus", MBPP_PLUS, MBPP["code"], True),
        ("mbpp_plus", MBPP_PLUS, "def square_perimeter(a): return 4 * a if a else 1", False),
    ],
)
def test_programs_are_marked_by_their_tests(name: Any, row: dict[str, Any], text: str, is_right: bool) -> None:
    assert BENCHMARKS[name].mark(row, text) == {"pass@1": is_right}


def test_the_entry_point_of_mbpp_is_what_the_reference_defines() -> None:
    wrapped = {**MBPP, "test_list": ["assert set(square_perimeter(10)) == set([40])"]}
    assert entry_point(MBPP) == entry_point(wrapped) == "square_perimeter"
    with pytest.raises(ValueError, match="calls no function of its `code`"):
        entry_point({**MBPP, "test_list": ["assert True"]})


def test_mbpp_asks_its_test_split() -> None:
    is_test = BENCHMARKS["mbpp"].is_test
    assert [is_test({"task_id": number}) for number in (2, 10, 11, 510, 511)] == [False, False, True, True, False]
    assert is_test({"task_id": "17"})
