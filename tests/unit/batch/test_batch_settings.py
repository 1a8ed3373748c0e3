"""Settings of a line's own, where the run file names the field that holds them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from batch_files import Lines, execute, records, write_input
from pydantic import ValidationError
from scripted import ScriptedGenerator

from common.batch import run_batch
from common.config import DecodeConfig, DeviceProfile, InputConfig, RunConfig
from common.decoding import Completion, GenerationRequest, Rejection
from common.errors import ConfigError

BASE = DecodeConfig(num_lookahead=3, temperature=0.5, top_p=0.8, stop=("C",))
GSM8K = {"question": "1 + 1?", "answer": "#### 2"}


def of(run: RunConfig, decode: DecodeConfig = BASE, **source: Any) -> RunConfig:
    assert run.input is not None
    own = run.input.model_copy(update={"settings_field": "decode", **source})
    return run.model_copy(update={"input": own, "decode": decode})


def asked(profile: DeviceProfile, run: RunConfig, lines: Lines) -> list[GenerationRequest]:
    """What the generator is asked for."""
    found: list[GenerationRequest] = []

    class Listening(ScriptedGenerator):
        def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Completion | Rejection]:
            for request in requests:
                found.append(request)
                yield from super().generate([request])

    write_input(run, lines)
    run_batch(profile, run, lambda: Listening(profile, run), overwrite=True)
    return found


def test_a_line_changes_the_settings_that_it_names_for_itself_alone(cpu: DeviceProfile, run: RunConfig) -> None:
    own: dict[str, Any] = {"num_lookahead": 0, "skip_threshold": 0.5, "max_new_tokens": 512, "stop": ["B", "D"]}
    lines: Lines = [{"prompt": "x"}, {"prompt": "y", "decode": own, "seed": 3}, {"prompt": "z", "seed": 2**63 - 1}]
    first, second, third = asked(cpu, of(run), lines)
    assert (first.decode, first.seed) == (None, None) and (third.decode, third.seed) == (None, 2**63 - 1)
    assert second.decode == BASE.model_copy(update={**own, "stop": ("B", "D", "C")}) and second.seed == 3


def test_the_fields_are_data_unless_the_run_file_names_one(cpu: DeviceProfile, run: RunConfig) -> None:
    line = {"prompt": "x", "decode": "a word", "seed": "nothing", "own": {"num_lookahead": 1}}
    (unnamed,) = asked(cpu, of(run, settings_field=None), [line])
    assert unnamed == GenerationRequest("1", (ord("x"),))
    (named,) = asked(cpu, of(run, settings_field="own"), [{**line, "seed": None}])
    assert named.decode == BASE.model_copy(update={"num_lookahead": 1})


@pytest.mark.parametrize("nothing", [{}, {"decode": None}, {"decode": {}}, {"seed": None}])
def test_null_and_nothing_leave_the_runs_settings(cpu: DeviceProfile, run: RunConfig, nothing: dict[str, Any]) -> None:
    (request,) = asked(cpu, of(run), [{"prompt": "x", **nothing}])
    assert (request.decode, request.seed) == (None, None)


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"decode": 3}, 'decode: write it as an object, such as {"num_lookahead": 0}, or leave it out'),
        ({"decode": [{"num_lookahead": 0}]}, "decode: write it as an object, such as"),
        ({"decode": "k=0"}, "decode: write it as an object, such as"),
        ({"decode": {"temprature": 1}}, "decode.temprature: unknown key; did you mean temperature?"),
        ({"decode": {"seed": 1}}, "decode.seed: write it beside decode, as a field of the line"),
        ({"decode": {"branching_factor": 4}}, "decode.branching_factor: published scripts use it for both k and k+1"),
        ({"decode": {"max_new_tokens": None}}, "decode.max_new_tokens: set it to a whole number (given None)"),
        ({"decode": {"temperature": "hot"}}, "decode.temperature: set it to a number (given 'hot')"),
        ({"decode": {"temperature": "0.5"}}, "decode.temperature: set it to a number (given '0.5')"),
        ({"decode": {"top_k": "4"}}, "decode.top_k: set it to a whole number (given '4')"),
        ({"decode": {"stop_at_eos": "no"}}, "decode.stop_at_eos: write it without quotes (given 'no')"),
        ({"decode": {"temperature": True}}, "decode.temperature: set it to a number (given True)"),
        ({"decode": {"temperature": float("nan")}}, "decode.temperature: set it to a finite number"),
        ({"decode": {"num_lookahead": -1}}, "decode.num_lookahead: set it to 0 or more (given -1)"),
        ({"decode": {"num_lookahead": "auto"}}, "decode.num_lookahead: the run's pace says that now: leave it"),
        ({"decode": {"skip_threshold": 0}}, "decode.skip_threshold: set it to more than 0.0 (given 0.0)"),
        ({"decode": {"max_new_tokens": 10**20}}, "decode.max_new_tokens: set it to less than 2^63"),
        ({"decode": {"max_new_tokens": 16}}, "decode.max_new_tokens: block_size 32 is larger than max_new_tokens 16"),
        ({"decode": {"max_new_tokens": 64, "max_tokens": 9}}, "decode.max_new_tokens: max_tokens says how long the"),
        ({"decode": {"max_tokens": 0}}, "decode.max_tokens: set it to 1 or more (given 0)"),
        (
            {"decode": {"max_tokens": 500}},
            "decode.max_tokens: 500 tokens after a prompt of 1, in whole blocks up to 512",
        ),
        ({"decode": {"stop": ["B", 3]}}, "decode.stop.1: write it as text, in quotes if need be (given 3)"),
        ({"decode": {"stop": ["\ud800"]}}, "decode.stop.0: write it without half a surrogate pair"),
        ({"decode": {"branch_score": "best"}}, "decode.branch_score: "),
        ({"decode": {"strategy": {"cache": "dual"}}}, "decode.strategy.cache: it is a key of strategy fast_dllm and"),
        ({"decode": {"spawn_blocks": "first"}}, "decode.spawn_blocks: spawn_blocks is no key of decode any more: "),
        ({"seed": "a"}, "seed: set it to a whole number (given 'a')"),
        ({"seed": "3"}, "seed: set it to a whole number (given '3')"),
        ({"seed": True}, "seed: set it to a whole number (given True)"),
        ({"seed": 2**63}, "seed: set it to less than 9223372036854775808"),
        ({"seed": [1], "decode": {"num_lookahead": 0}}, "seed: set it to a whole number (given [1])"),
    ],
)
def test_what_is_wrong_with_them_is_the_lines_error_and_the_run_goes_on(
    cpu: DeviceProfile, run: RunConfig, own: dict[str, Any], sentence: str
) -> None:
    write_input(run, [{"id": "a", "prompt": "x"}, {"id": "bad", "prompt": "y", **own}, {"id": "b", "prompt": "z"}])
    execute(cpu, of(run))
    by_id = {record["id"]: record for record in records(run)}
    assert by_id["bad"].keys() == {"id", "error"}
    assert by_id["bad"]["error"].startswith(f"line 2: {sentence}") and "\n" not in by_id["bad"]["error"]
    assert (by_id["a"]["text"], by_id["b"]["text"]) == ("X", "Z")


def test_a_field_of_another_name_is_named_so(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"prompt": "x", "settings": {"top_k": -2}}])
    execute(cpu, of(run, settings_field="settings"))
    assert records(run)[0]["error"] == "line 1: settings.top_k: set it to -1 or more (given -2)"


@pytest.mark.parametrize("own", [{"k" * 10**5: 1}, {"temperature": "x" * 10**6}, {"stop": [[0] * 10**5]}])
def test_an_endless_mistake_is_a_short_error(cpu: DeviceProfile, run: RunConfig, own: dict[str, Any]) -> None:
    write_input(run, [{"prompt": "x", "decode": own}])
    execute(cpu, of(run))
    assert len(records(run)[0]["error"]) < 2000


@pytest.mark.parametrize("temperature", [0, 1e-40, 1e-5])
def test_a_temperature_of_0_takes_top_p_away(cpu: DeviceProfile, run: RunConfig, temperature: float) -> None:
    own: Lines = [{"temperature": temperature}, {"temperature": temperature, "top_p": 0.9, "top_k": 5}]
    for request in asked(cpu, of(run), [{"prompt": "x", "decode": settings} for settings in own]):
        assert request.decode == BASE.model_copy(update={"temperature": 0.0, "top_p": 1.0})


def test_a_text_ends_at_the_stop_strings_of_its_line_and_of_the_run(cpu: DeviceProfile, run: RunConfig) -> None:
    own: list[dict[str, Any]] = [{}, {"decode": {"stop": "B"}}, {"decode": {"stop": []}}, {"decode": {"top_k": 9}}]
    write_input(run, [{"prompt": "abcd", **fields} for fields in own])
    execute(cpu, of(run))
    assert [record["text"] for record in records(run)] == ["AB", "A", "AB", "AB"]


def test_a_record_says_nothing_new(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"prompt": "x"}, {"prompt": "x", "decode": {"num_lookahead": 0}, "seed": 1}])
    execute(cpu, of(run))
    first, second = records(run)
    assert first.keys() == second.keys() and second["steps"] == 3 > first["steps"]  # the scripted answer follows k


def test_the_settings_of_a_line_come_beside_the_benchmarks(cpu: DeviceProfile, run: RunConfig) -> None:
    rows: Lines = [GSM8K, {**GSM8K, "decode": {"num_lookahead": 1}}, {**GSM8K, "decode": {"stop": ["+"]}}]
    plain = of(run, DecodeConfig(), benchmark="gsm8k", num_fewshot=0)
    first, second, third = asked(cpu, plain, rows)
    assert first.decode is not None and second.decode is not None and third.decode is not None
    assert first.decode.stop == second.decode.stop == ("Question:", "</s>", "<|im_end|>")
    assert (second.decode.num_lookahead, third.decode.num_lookahead) == (1, 3)
    assert third.decode.stop == ("+", *first.decode.stop)
    assert [record["text"].endswith("1 ") for record in records(run)] == [False, False, True]


def test_a_line_that_changes_and_a_field_that_is_named_are_another_run(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"prompt": "x", "decode": {"num_lookahead": 0}}])
    execute(cpu, of(run))
    execute(cpu, of(run))
    with pytest.raises(ConfigError, match=r"input\.settings_field was 'decode', is None"):
        execute(cpu, of(run, settings_field=None))
    write_input(run, [{"prompt": "x", "decode": {"num_lookahead": 1}}])
    with pytest.raises(ConfigError, match="input_sha256"):
        execute(cpu, of(run))


@pytest.mark.parametrize(("fields", "is_told"), [({}, True), ({"decode": None}, False), ({"seed": 1}, False)])
def test_a_field_that_no_line_has_is_told_of(
    cpu: DeviceProfile, run: RunConfig, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], is_told: bool
) -> None:
    write_input(run, [{"prompt": "x", **fields}, "{"])
    execute(cpu, of(run))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("input.settings_field is decode, and no line has this field" in text for text in warnings) == is_told


@pytest.mark.parametrize("name", ["id", "prompt", "messages", "question", "seed", ""])
def test_the_field_cannot_be_one_with_a_meaning(name: str) -> None:
    with pytest.raises(ValidationError, match="settings_field"):
        InputConfig(path="in.jsonl", settings_field=name)
