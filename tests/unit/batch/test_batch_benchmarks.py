"""A benchmark through a batch run: ids, marks by every rule, and no program that nobody has allowed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from batch_files import execute, output_path, records, write_input
from scripted import ScriptedGenerator

from common.batch import check_input, run_batch
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import Completion, GenerationRequest, Rejection
from common.errors import ConfigError

GSM8K = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "#### 4", "answer": "2 + 2 is\n#### 4"}]
HUMANEVAL = [{"task_id": "HumanEval/0", "prompt": "DEF F():\n", "entry_point": "F", "test": "def check(c): pass"}]
# These letters have no capitals, and Python reads them as `max`.
DEMO = [{"id": "a", "prompt": "F=𝚖𝚊𝚡", "kind": "code", "entry_point": "F", "inputs": [[[1, 2]]], "expected": [2]}]


def of(run: RunConfig, **settings: Any) -> RunConfig:
    assert run.input is not None
    return run.model_copy(update={"input": run.input.model_copy(update=settings)})


def never() -> Any:
    raise AssertionError("the model was loaded")


def test_answers_are_marked_by_every_rule(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, GSM8K)
    metrics = execute(cpu, of(run, benchmark="gsm8k", num_fewshot=0))
    assert metrics is not None
    found = records(run)
    assert found[0]["text"] == "QUESTION: 1 + 1?\nANSWER:"
    assert [record["correct"] for record in found] == [False, True]
    assert found[1]["by_rule"] == {"strict-match": True, "flexible-extract": True}
    assert metrics["accuracy"]["by_rule"]["flexible-extract"]["share"] == 0.5


def test_stop_strings_are_the_benchmarks_unless_the_run_has_some(cpu: DeviceProfile, run: RunConfig) -> None:
    asked: list[GenerationRequest] = []

    class Listening(ScriptedGenerator):
        def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Completion | Rejection]:
            asked.extend(requests)
            return super().generate(asked[-1:])

    write_input(run, GSM8K[:1])
    gsm8k = of(run, benchmark="gsm8k", num_fewshot=0)
    own = gsm8k.model_copy(update={"decode": DecodeConfig(stop=("1 +",))})
    for chosen in (gsm8k, own):
        run_batch(cpu, chosen, lambda chosen=chosen: Listening(cpu, chosen), overwrite=True)  # type: ignore[misc]
    assert asked[0].decode is not None and asked[0].decode.stop == ("Question:", "</s>", "<|im_end|>")
    assert asked[1].decode is None and records(run)[0]["text"] == "QUESTION: "


def test_a_question_may_be_asked_as_a_chat(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, HUMANEVAL)
    settings = {"benchmark": "humaneval_instruct", "apply_chat_template": True, "run_generated_code": False}
    execute(cpu, of(run, **settings))
    text = records(run)[0]["text"]
    assert text.startswith("<WRITE A SOLUTION") and text.endswith(
        "```\n>HERE IS THE COMPLETED FUNCTION:\n```PYTHON\nDEF F():\n\n"
    )


def test_a_task_id_names_the_record(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, HUMANEVAL)
    execute(cpu, of(run, benchmark="humaneval", run_generated_code=False))
    (record,) = records(run)
    assert record["id"] == "HumanEval/0" and record["kind"] == "code"


def test_rows_beyond_the_test_split_are_not_asked(cpu: DeviceProfile, run: RunConfig) -> None:
    row = {"text": "add", "code": "def f(): pass", "test_list": ["assert f()"] * 3}
    write_input(run, [{**row, "task_id": number} for number in (2, 11, 12, 600)])
    execute(cpu, of(run, benchmark="mbpp", num_fewshot=0, run_generated_code=False, limit=1))
    assert [record["id"] for record in records(run)] == [11]


@pytest.mark.parametrize(("lines", "benchmark"), [(HUMANEVAL, "humaneval"), (DEMO, None)])
def test_programs_are_refused_before_the_model_is_loaded(
    cpu: DeviceProfile, run: RunConfig, lines: list[dict[str, Any]], benchmark: str | None
) -> None:
    write_input(run, lines)
    with pytest.raises(ConfigError, match=r"allow it with --allow-code-execution \(input.run_generated_code: true\)"):
        run_batch(cpu, of(run, benchmark=benchmark), never)
    assert not output_path(run).exists()


@pytest.mark.parametrize(("is_allowed", "expected"), [(True, {"correct": True}), (False, {})])
def test_programs_are_run_where_that_is_allowed(
    cpu: DeviceProfile, run: RunConfig, is_allowed: bool, expected: dict[str, bool]
) -> None:
    write_input(run, DEMO)
    execute(cpu, of(run, run_generated_code=is_allowed))
    (record,) = records(run)
    assert {name: record[name] for name in ("correct",) if name in record} == expected
    assert ("unscored" in record) is not is_allowed


@pytest.mark.parametrize("line", [{"question": "?"}, {"prompt": "x"}, {"question": "?", "answer": 3}])
def test_rows_of_something_else_are_refused(cpu: DeviceProfile, run: RunConfig, line: dict[str, Any]) -> None:
    write_input(run, [GSM8K[0], line])
    with pytest.raises(ConfigError, match=r"in.jsonl: line 2 is no row of gsm8k: it has no .*set input.benchmark"):
        run_batch(cpu, of(run, benchmark="gsm8k", num_fewshot=0), never)


MATH = {"problem": "1 + 1?", "solution": "It is \\boxed{2}."}
MBPP = {"text": "add", "code": "def f(): pass", "test_list": ["assert f()"]}


@pytest.mark.parametrize(
    ("benchmark", "right", "wrong", "missing"),
    [
        ("gsm8k", GSM8K[0], {"answer": "It is 2."}, "its `answer` has no '#### N', the number"),
        ("gsm8k", GSM8K[0], {"answer": "#### two"}, "its `answer` has no '#### N', the number"),
        ("math", MATH, {"solution": "It is 2."}, r"its `solution` has no \\boxed{}, the result"),
        (
            "humaneval",
            HUMANEVAL[0],
            {"entry_point": "f()"},
            r"its `entry_point` 'f\(\)' is no name of a Python function",
        ),
        ("humaneval_plus", HUMANEVAL[0], {"entry_point": "class"}, "its `entry_point` 'class' is no name"),
        ("mbpp", MBPP, {"test_list": []}, "the first assertion of its `test_list` calls no function of its `code`"),
    ],
)
def test_rows_that_no_answer_can_be_compared_with_are_refused_before_anything_starts(
    cpu: DeviceProfile, run: RunConfig, benchmark: str, right: dict[str, Any], wrong: dict[str, Any], missing: str
) -> None:
    chosen = of(run, benchmark=benchmark, num_fewshot=0, run_generated_code=False)
    assert chosen.input is not None
    write_input(run, [{**right, "task_id": 11}])
    check_input(chosen.input)
    write_input(run, [{**right, "task_id": 11}, {**right, **wrong, "task_id": 12}])
    sentence = f"in.jsonl: line 2 is no row of {benchmark}: {missing}"
    with pytest.raises(ConfigError, match=sentence):
        check_input(chosen.input)
    with pytest.raises(ConfigError, match=sentence):
        run_batch(cpu, chosen, never)


def test_a_line_that_is_no_row_can_be_reported(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [GSM8K[0], "{"])
    execute(cpu, of(run, benchmark="gsm8k", num_fewshot=0))
    assert "is not valid JSON" in records(run)[1]["error"] or "is not valid JSON" in records(run)[0]["error"]


def test_another_benchmark_is_another_run(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, GSM8K)
    execute(cpu, run)
    with pytest.raises(ConfigError, match=r"input\.benchmark was None, is 'gsm8k'"):
        execute(cpu, of(run, benchmark="gsm8k", num_fewshot=0))
