"""A benchmark in a run: its prompt with the solved rows in front, its stop strings, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from common.config import BenchmarkName, InputConfig, load_run
from common.errors import ConfigError
from common.scoring.benchmarks.task import BENCHMARKS, task_of

RUNS = Path(__file__).resolve().parents[4] / "configs" / "runs"
ROW = {"question": "1 + 1?", "answer": "It is\n#### 2"}


def source(name: Any, **settings: Any) -> InputConfig:
    return InputConfig(path="in.jsonl", benchmark=name, **settings)


def shots(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_every_name_has_a_benchmark() -> None:
    assert tuple(BENCHMARKS) == get_args(BenchmarkName)


@pytest.mark.parametrize("name", ["gsm8k", "math", "humaneval", "mbpp", "diffucoder_7b_mbpp"])
def test_the_page_names_the_fields_that_a_line_of_a_runs_file_needs(name: str) -> None:
    source = load_run(RUNS / f"{name}.yaml").input
    assert source is not None and source.benchmark is not None
    page = (RUNS.parents[1] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("|") and f"`{source.path}`" in line)
    needed = row.split("|")[3]
    assert set(BENCHMARKS[source.benchmark].fields) <= set(re.findall(r"\w+", needed))
    assert f'.to_json("{source.path}")' in page


def test_solved_rows_stand_in_front_of_the_question(tmp_path: Path) -> None:
    path = shots(tmp_path / "shots.jsonl", ROW, "", {**ROW, "question": "2 + 2?", "answer": "#### 4"}, ROW)
    task = task_of(source("gsm8k", num_fewshot=2, fewshot_path=path))
    assert task is not None
    first, second = "Question: 1 + 1?\nAnswer: It is\n#### 2\n\n", "Question: 2 + 2?\nAnswer: #### 4\n\n"
    prompt = task.prompt({**ROW, "question": "3?"})
    assert (prompt.text, prompt.begun) == (f"{first}{second}Question: 3?\nAnswer:", "")


@pytest.mark.parametrize(
    ("name", "count"), [("math", 4), ("math_plain", 4), ("mbpp", 3), ("mbpp_plus", 3), ("humaneval", 0)]
)
def test_solved_rows_come_along_where_lm_eval_has_its_own(name: Any, count: int) -> None:
    task = task_of(source(name))
    assert task is not None
    ends = {"math": "I hope it is correct.\n\n", "humaneval": "\n\n"}.get(name.split("_")[0], "[DONE]\n\n")
    assert task.shots.count(ends) == count


def test_the_answer_to_an_instruction_has_begun() -> None:
    task = task_of(source("humaneval_instruct"))
    assert task is not None
    prompt = task.prompt({"prompt": "def f():\n", "entry_point": "f", "test": ""})
    assert prompt.text.endswith("```python\ndef f():\n\n```\n")
    assert prompt.begun == "Here is the completed function:\n```python\ndef f():\n\n"


@pytest.mark.parametrize(
    ("rows", "settings", "expected"),
    [
        (None, {}, "gsm8k shows 5 solved rows in front of each question: name the JSONL file"),
        ((), {"num_fewshot": 1}, "0 solved rows, and input.num_fewshot is 1; lower it, or add rows"),
        ((ROW,), {}, "1 solved rows, and input.num_fewshot is 5"),
        (({"question": "?"},), {}, "line 1 is no row of gsm8k: it has no `answer` \\(its fields: question\\)"),
        (({"question": 3, "answer": "4"},), {}, "it has no text in `question`"),
        (("{",), {}, "line 1 is not valid JSON"),
        (("[]",), {}, "line 1 is not a JSON object"),
    ],
)
def test_solved_rows_that_are_none_are_refused(
    tmp_path: Path, rows: tuple[object, ...] | None, settings: dict[str, Any], expected: str
) -> None:
    given = {} if rows is None else {"fewshot_path": shots(tmp_path / "shots.jsonl", *rows)}
    with pytest.raises(ConfigError, match=expected):
        task_of(source("gsm8k", **settings, **given))


def test_a_missing_file_of_solved_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope.jsonl: No such file or directory; set input.fewshot_path"):
        task_of(source("gsm8k", fewshot_path=str(tmp_path / "nope.jsonl")))


@pytest.mark.parametrize("settings", [{"num_fewshot": 0}, {"fewshot_path": "x"}, {"apply_chat_template": True}])
def test_settings_of_a_benchmark_need_one(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="set benchmark, or remove it"):
        InputConfig(path="in.jsonl", **settings)


def test_a_benchmark_makes_its_own_prompts() -> None:
    with pytest.raises(ValueError, match="remove prompt_template"):
        source("gsm8k", prompt_template="{question}")


@pytest.mark.parametrize(
    ("name", "thresholds", "block_size", "branches"),
    [
        ("gsm8k", (0.1, 0.95, 0.9), 32, 14),
        ("math", (0.1, 0.95, 0.9), 16, 7),
        ("humaneval", (0.3, 0.95, 0.95), 32, 7),
        ("mbpp", (0.3, 0.95, 0.95), 32, 7),
    ],
)
def test_the_shipped_runs_have_the_papers_settings(
    name: str, thresholds: tuple[float, ...], block_size: int, branches: int
) -> None:
    """arXiv 2512.16229, Table 5."""
    run = load_run(RUNS / f"{name}.yaml")
    decode = run.decode
    assert (decode.block_add_threshold, decode.decoded_token_threshold, decode.skip_threshold) == thresholds
    assert (decode.block_size, decode.num_lookahead + 1) == (block_size, branches)
    assert run.input is not None and run.input.benchmark == name
    assert run.input.run_generated_code is None
