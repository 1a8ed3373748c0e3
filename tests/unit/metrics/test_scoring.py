"""Scoring tells right from wrong and survives what a model may write."""

import json
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest

from common.metrics import score, standard_error
from common.metrics.scoring import FILE_LIMIT_BYTES, TIME_LIMIT_S, score_math

DOUBLE = {
    "kind": "code", "question": "Write double(n).", "entry_point": "double",
    "inputs": [[n] for n in range(12)], "expected": [2 * n for n in range(12)],
}  # fmt: skip
RIGHT = "def double(n):\n    return 2 * n"
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


def test_right_code_scores_fenced_or_not() -> None:
    assert score(DOUBLE, "def double(n):\n    print('noise')\n    return n + n")
    assert score(DOUBLE, "Here it is:\n```python\ndef double(n):\n    return n + n\n```\nDone.")


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


@pytest.mark.parametrize("body", ["while True:\n        pass", "import time\n    time.sleep(60)"])
def test_endless_code_is_stopped(body: str) -> None:
    began = time.monotonic()
    assert not score(DOUBLE, f"def double(n):\n    {body}")
    assert time.monotonic() - began < TIME_LIMIT_S + 2


def test_memory_is_limited() -> None:
    assert not score(DOUBLE, "def double(n):\n    hog = bytearray(2**30)\n    return 2 * n")
    assert score(DOUBLE, "def double(n):\n    hog = bytearray(2**20)\n    return 2 * n")


def test_large_files_are_refused() -> None:
    write = "def double(n):\n    with open('f', 'wb') as file:\n        file.write(bytes({size}))\n    return 2 * n"
    assert not score(DOUBLE, write.format(size=FILE_LIMIT_BYTES + 1))
    assert score(DOUBLE, write.format(size=100))


def test_code_starts_in_an_empty_folder_that_goes_away(tmp_path: Path) -> None:
    report = tmp_path / "seen"
    look = f"import os\nopen({str(report)!r}, 'w').write(os.getcwd())\nassert not os.listdir()\n"
    assert score(DOUBLE, look + RIGHT)
    assert not Path(report.read_text()).exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="the process limit does not bind root")
def test_processes_are_refused() -> None:
    assert not score(DOUBLE, "import os\ndef double(n):\n    if os.fork() == 0:\n        os._exit(0)\n    return 2 * n")


def test_what_the_code_leaves_running_is_ended(tmp_path: Path) -> None:
    late = tmp_path / "late"
    wait = f"import os, time\nif not os.fork():\n    time.sleep({TIME_LIMIT_S + 1})\n"
    leave = wait + f"    open({str(late)!r}, 'w').close()\n    os._exit(0)\n"
    score(DOUBLE, leave + RIGHT)
    time.sleep(1.5)
    assert not late.exists()


def test_held_out_references_score_on_their_own_problems() -> None:
    problems = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    for problem, other in pairwise(problems[:21]):
        assert len(problem["inputs"]) == len(problem["expected"]) == 12
        assert score(problem, problem["reference"])
        assert not score(problem, other["reference"])


def test_standard_error_is_binomial() -> None:
    assert standard_error(50, 100) == pytest.approx(0.05)
    assert standard_error(100, 100) == 0.0
