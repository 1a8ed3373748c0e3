"""A benchmark through a batch run: ids, marks by every rule, and no program that nobody has allowed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_files import execute, output_path, records, write_input
from scripted import ScriptedGenerator, ScriptedTokenizer, answer

from common.batch import InputLine, check_input, run_batch
from common.batch.cautions import cautions
from common.config import DecodeConfig, DeviceProfile, InputConfig, RunConfig
from common.decoding import Completion, GenerationRequest, Rejection
from common.errors import ConfigError
from common.scoring import BENCHMARKS, task_of
from common.scoring.programs.isolation import program_scorer
from common.scoring.results import symbolic
from common.text import before_stop

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
    assert found[1]["by_rule"] == {"number": True, "strict-match": True, "flexible-extract": True}
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


@pytest.mark.parametrize("name", ["gsm8k", "math_plain", "humaneval", "humaneval_instruct", "mbpp", "mbpp_plus"])
def test_an_answer_to_a_message_is_not_cut_where_a_completion_would_be(name: Any) -> None:
    source = InputConfig(path="x", benchmark=name, num_fewshot=0)
    task, chat = task_of(source), task_of(source.model_copy(update={"apply_chat_template": True}))
    assert task is not None and task.stop == task.benchmark.stop != ()
    assert chat is not None and chat.stop == ()


FENCED = (
    "Sure, here it is:\n\n```python\nfrom typing import List\n\ndef f(x):\n    return x + 1\n\n# So\nprint(f(1))\n```\n"
)
ADD = {"prompt": 'def f(x):\n    """Add 1."""\n', "entry_point": "f", "test": "def check(c):\n    assert c(1) == 2"}
ADD_MBPP = {"task_id": 11, "text": "Add 1.", "code": "def f(x): return x + 1", "test_list": ["assert f(1) == 2"]}


class Chatting(ScriptedGenerator):
    """Answers with the same text, as far as the stop strings let it."""

    text = FENCED

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Completion | Rejection]:
        for request in requests:
            decode = request.decode or self.run.decode
            tokens = tuple(self.tokenizer.encode(before_stop(self.text, decode.stop)))
            yield replace(answer(request, decode), token_ids=tokens)


@pytest.mark.parametrize(("name", "row"), [("humaneval", ADD), ("mbpp", ADD_MBPP)])
@pytest.mark.parametrize("is_right", [True, False])
def test_a_function_in_a_fence_is_marked_by_what_it_does(
    cpu: DeviceProfile, run: RunConfig, name: Any, row: dict[str, Any], is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chatting, "text", FENCED if is_right else FENCED.replace("x + 1", "x + 2"))
    write_input(run, [row])
    chosen = of(run, benchmark=name, num_fewshot=0, apply_chat_template=True, run_generated_code=True)
    metrics = run_batch(cpu, chosen, lambda: Chatting(cpu, chosen))
    (record,) = records(run)
    assert record["correct"] is is_right and record["scored_by"] == program_scorer()
    assert metrics is not None and metrics["accuracy"]["scored_by"] == {program_scorer(): 1}


@pytest.mark.parametrize(
    "text", ["[BEGIN]\n{}\n[DONE]\nDone.", "[BEGIN]\n```python\n{}\n```\n[DONE]", "I write [DONE] last.\n{}"]
)
def test_the_marks_of_the_prompt_of_mbpp_are_no_part_of_a_program(text: str) -> None:
    for code, is_right in (("def f(x):\n    return x + 1", True), ("def f(x):\n    return x", False)):
        assert BENCHMARKS["mbpp"].mark(ADD_MBPP, text.format(code)) == {"pass@1": is_right}


def test_a_model_without_a_chat_template_is_told_of_the_setting(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedTokenizer, "has_chat_template", False)
    write_input(run, GSM8K[:1])
    execute(cpu, of(run, benchmark="gsm8k", num_fewshot=0, apply_chat_template=True))
    assert records(run)[0]["error"].startswith("line 1: input.apply_chat_template: the model has no chat template")


def test_a_missing_parser_is_refused_before_the_model_is_loaded(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symbolic, "_version", lambda _: None)
    write_input(run, [MATH])
    chosen = of(run, benchmark="math", num_fewshot=0)
    assert chosen.input is not None
    sentence = r"pip install 'lopa\[eval\]', or set input.benchmark to math_plain"
    with pytest.raises(ConfigError, match=sentence):
        check_input(chosen.input)
    with pytest.raises(ConfigError, match=sentence):
        run_batch(cpu, chosen, never)


def test_records_and_metrics_say_what_compared(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"problem": r"\boxed{2}", "solution": r"\boxed{2}"}])
    metrics = execute(cpu, of(run, benchmark="math_plain", num_fewshot=0))
    (record,) = records(run)
    assert metrics is not None and record["scored_by"] == "texts and numbers"
    assert metrics["accuracy"]["scored_by"] == {"texts and numbers": 1}


@pytest.mark.parametrize(
    ("decode", "num_fewshot", "expected"),
    [
        ({}, 1, []),
        ({"max_new_tokens": 8, "block_size": 8}, 1, ["decode.max_new_tokens is 8, and 1 of 2 right answers"]),
        ({"stop": ("\n", "Q:")}, 1, ["decode.stop has '\\n', which stands in 1 of 2 right answers"]),
        ({}, 0, ["input.num_fewshot is 0: no solved row shows the form in which gsm8k looks for"]),
    ],
)
def test_settings_that_mark_right_answers_wrong_are_told(
    tmp_path: Path, decode: dict[str, Any], num_fewshot: int, expected: list[str]
) -> None:
    lines = [InputLine(number, number, row) for number, row in enumerate(GSM8K)]
    (tmp_path / "shots.jsonl").write_text(json.dumps(GSM8K[0]) + "\n")
    shots = str(tmp_path / "shots.jsonl")
    source = InputConfig(path="x", benchmark="gsm8k", fewshot_path=shots, num_fewshot=num_fewshot)
    found = list(cautions(lines, source, DecodeConfig(**decode), ScriptedTokenizer()))
    assert [caution[: len(start)] for caution, start in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize("stop", ["```", "\ndef", "return"])
def test_a_stop_that_cuts_fenced_programs_is_told(stop: str) -> None:
    row = {**ADD, "canonical_solution": "    return x + 1\n"}
    source, decode = InputConfig(path="x", benchmark="humaneval", apply_chat_template=True), DecodeConfig(stop=(stop,))
    (found,) = cautions([InputLine(1, 1, row)], source, decode, ScriptedTokenizer())
    assert found.startswith(f"decode.stop has {stop!r}, which stands in 1 of 1 right answers")
    assert not list(cautions([InputLine(1, 1, ADD)], source, decode, ScriptedTokenizer()))


def test_cautions_are_logged_before_anything_is_decoded(
    cpu: DeviceProfile, run: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    write_input(run, GSM8K)
    execute(cpu, of(run, benchmark="gsm8k", num_fewshot=0))
    assert any("input.num_fewshot is 0" in record.message for record in caplog.records)


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


def test_a_file_without_rows_of_the_test_split_is_told_so(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{**ADD_MBPP, "task_id": number} for number in (601, 700)])
    chosen = of(run, benchmark="mbpp", num_fewshot=0, run_generated_code=False)
    with pytest.raises(ConfigError, match=r"in\.jsonl: none of its rows is of the test split of mbpp"):
        run_batch(cpu, chosen, never)


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
        ("math_plain", MATH, {"solution": "It is 2."}, r"its `solution` has no \\boxed{}, the result"),
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
