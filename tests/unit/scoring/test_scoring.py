"""Scoring tells right from wrong and survives what a model may write."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from common.config import InputConfig
from common.processes import Stopped
from common.scoring import marking, score, standard_error
from common.scoring.marking import marks
from common.scoring.own_results import score_math
from common.scoring.programs.isolation import program_scorer

DOUBLE = {
    "kind": "code", "question": "Write double(n).", "entry_point": "double",
    "inputs": [[n] for n in range(12)], "expected": [2 * n for n in range(12)],
}  # fmt: skip
RIGHT = "def double(n):\n    return 2 * n"
ALLOWED = InputConfig(path="in.jsonl", run_generated_code=True)
HELD_OUT = Path(__file__).parents[3] / "models" / "demo" / "heldout_code.jsonl"


@pytest.mark.parametrize("text", ["so\n#### 42", "#### 7\n#### 42", "#### $42.0", "####42 apples", "#### 42."])
def test_the_last_marked_number_counts(text: str) -> None:
    assert score_math(text, 42)


@pytest.mark.parametrize("text", ["42", "#### 41", "#### 42\n#### 7", "#### -42", "", "#### many"])
def test_other_numbers_do_not_count(text: str) -> None:
    assert not score_math(text, "42")


def test_gsm8k_records_are_math() -> None:
    problem = {"question": "How many?", "answer": "2*600=<<2*600=1200>>1200\n#### 1,200"}
    assert score(problem, "#### 1200")
    assert not score(problem, "#### 120")


def test_a_math_problem_without_a_result_is_refused() -> None:
    with pytest.raises(ValueError, match="####"):
        score({"question": "How many?", "answer": "12"}, "#### 12")


TEXTS = ["#### 12", "no number", "#### 0", ""]


@pytest.mark.parametrize("final", ["abc", [1], "NaN", "inf", None, {}, True, float("nan"), "", "1 2", "1,2"], ids=repr)
def test_a_final_that_is_no_number_is_unscored_whatever_the_text(final: object) -> None:
    for text in TEXTS:
        with pytest.raises(ValueError, match="`final` is no number"):
            score({"final": final}, text)


@pytest.mark.parametrize("final", [12, 12.0, "12", "12.00", "1.2e1", " 12 ", "$12", "24/2"], ids=repr)
def test_a_final_may_be_written_in_any_way(final: object) -> None:
    assert [score({"final": final}, text) for text in TEXTS] == [True, False, False, False]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("inputs", 5),
        ("inputs", None),
        ("inputs", "ab"),
        ("inputs", {"a": 1}),
        ("inputs", [1, 2]),
        ("inputs", [["a"], "b"]),
        ("inputs", []),
        ("expected", 5),
        ("expected", {"a": 1}),
        ("expected", [2]),
        ("entry_point", 7),
        ("entry_point", ["double"]),
    ],
)
def test_a_code_problem_that_nothing_solves_is_unscored_whatever_the_text(key: str, value: object) -> None:
    for text in (RIGHT, "not code"):
        with pytest.raises(ValueError, match=r"`(inputs|expected|entry_point)` is no "):
            score({**DOUBLE, key: value}, text)


@pytest.mark.parametrize(
    "error", [RecursionError("deep"), MemoryError(), OSError("no cell"), UnicodeDecodeError("utf-8", b"", 0, 1, "x")]
)
def test_whatever_hinders_scoring_leaves_the_record_unscored(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise error

    monkeypatch.setattr(marking, "score", fail)
    assert marks(DOUBLE, RIGHT, ALLOWED) == {"kind": "code", "unscored": f"{type(error).__name__}: {error}"}


def test_a_run_that_is_stopped_while_it_scores_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> bool:
        raise Stopped(15)

    monkeypatch.setattr(marking, "score", stop)
    with pytest.raises(Stopped):
        marks(DOUBLE, RIGHT, ALLOWED)


def test_an_unscored_record_says_why() -> None:
    unscored = {"unscored": "ValueError: `final` is no number: 'abc'"}
    assert marks({"final": "abc"}, "no number", ALLOWED) == unscored
    assert marks({**DOUBLE, "inputs": 5}, RIGHT, ALLOWED)["unscored"].startswith("ValueError: `inputs` is no list")
    assert marks(DOUBLE, RIGHT, ALLOWED) == {"kind": "code", "correct": True, "scored_by": program_scorer()}


def test_right_code_scores_fenced_or_not() -> None:
    assert score(DOUBLE, "def double(n):\n    print('noise')\n    return n + n")
    assert score(DOUBLE, "Here it is:\n```python\ndef double(n):\n    return n + n\n```\nDone.")
    assert score(DOUBLE, "1. First\n\n   ~~~py\n   def double(n):\n       return n + n\n   ~~~\n\n   ```\n   4\n   ```")


@pytest.mark.parametrize(
    "text",
    [
        "def double(n):\n    return n * n",
        "def double(n):\n    return 2.0 * n",
        "def triple(n):\n    return 2 * n",
        "def double(n)\n    return 2 * n",
        "import os\nos._exit(0)",
        "def double(n):\n    return {1, 2}",
        "raise SystemExit",
        "",
    ],
)
def test_wrong_code_does_not_score(text: str) -> None:
    assert not score(DOUBLE, text)


@pytest.mark.parametrize(
    ("expected", "body", "is_right"),
    [
        ([{"a": [1, True]}], "return {'a': (1, True)}", True),
        ([{"a": [1, True]}], "return {'a': [True, True]}", False),
        ([{"a": 1}], "return {'a': True}", False),
        ([{"a": 1}], "return {'a': 1, 'b': 1}", False),
        ([{"a": 1, "b": 2}], "return {'b': 2, 'a': 1}", True),
        ([[1, [2]]], "return [1, [2], 3]", False),
        ([None], "pass", True),
    ],
)
def test_results_are_equal_in_value_and_type_all_the_way_down(expected: list[Any], body: str, is_right: bool) -> None:
    problem = {"kind": "code", "entry_point": "f", "inputs": [[]], "expected": expected}
    assert score(problem, f"def f():\n    {body}") is is_right


def test_held_out_references_score_on_their_own_problems() -> None:
    problems = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    for problem, other in pairwise(problems[:21]):
        assert len(problem["inputs"]) == len(problem["expected"]) == 12
        assert score(problem, problem["reference"])
        assert not score(problem, other["reference"])


def test_standard_error_is_binomial() -> None:
    assert standard_error(50, 100) == pytest.approx(0.05)
    assert standard_error(100, 100) == 0.0


def test_a_draft_in_a_models_thoughts_is_no_answer() -> None:
    problem = {"question": "?", "answer": "#### 4"}
    assert score(problem, "<think>\nperhaps #### 5\n</think>\nIt is #### 4")
    assert not score(problem, "<think>\n#### 4\n</think>\nIt is #### 5")
