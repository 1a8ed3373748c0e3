"""Batch runs with a scripted generator: what is read, what is written, and what survives a kill at any moment."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_files import (
    RUN,
    Interrupted,
    Lines,
    StopsAfter,
    execute,
    output_path,
    records,
    sweep_of,
    without_this_start,
    write_input,
)
from scripted import ScriptedGenerator, ScriptedTokenizer

from common.batch import prompt_or_reason, read_lines, read_records, run_batch
from common.batch.files import sidecar_path
from common.batch.output import OutputFile, join_output, start_output
from common.config import DecodeConfig, DeviceProfile, InputConfig, OutputConfig, RunConfig
from common.errors import ConfigError
from common.evaluation import evaluate_sweep

SCRIPTED = Path(__file__).parents[2] / "scripted.py"


# What is read


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ({"path": "o.jsonl", "metrics_path": "."}, "output.metrics_path . is a folder: name a file in it"),
        ({"path": "in.jsonl/o.jsonl"}, "output.path in.jsonl/o.jsonl cannot be written"),
        ({"path": "new/"}, "output.path new/ is a folder: name a file in it"),
        ({"path": "o.csv"}, "output.path o.csv: answers are JSON lines or Parquet: name it"),
        ({"path": "o.jsonl.gz"}, "output.path o.jsonl.gz: answers are JSON lines or Parquet: name it"),
    ],
)
def test_a_place_that_cannot_hold_results_is_refused_before_anything_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: DeviceProfile, output: dict[str, str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "hi"}\n')
    run = RunConfig(model="m", input=InputConfig(path="in.jsonl"), output=OutputConfig(**output))
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        execute(cpu, run)


def test_a_table_is_no_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: DeviceProfile) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.csv").write_text("question\nhi\n")
    run = RunConfig(model="m", input=InputConfig(path="in.csv"), output=OutputConfig(path="o.jsonl"))
    with pytest.raises(ConfigError, match=re.escape("input.path in.csv: requests are JSON lines or Parquet: convert")):
        execute(cpu, run)
    assert not Path("o.jsonl").exists()


def test_each_kind_of_line_becomes_its_prompt(tmp_path: Path) -> None:
    def prompt(line: dict[str, Any], template: str | None = None, chat: bool = True) -> str:
        (tmp_path / "in.jsonl").write_text(json.dumps(line) + '\n{"id": "other", "question": "?"}\n')
        config = InputConfig(path=str(tmp_path / "in.jsonl"), prompt_template=template)
        tokenizer = ScriptedTokenizer()
        tokenizer.has_chat_template = chat
        ids = prompt_or_reason(read_lines(config)[0], config, tokenizer)
        return ids if isinstance(ids, str) else tokenizer.decode(list(ids))

    chat = [{"role": "user", "content": "hi"}]
    assert prompt({"prompt": "hi"}) == "hi"
    assert prompt({"messages": chat}) == "<hi>"
    assert (
        prompt({"messages": chat}, chat=False)
        == "line 1: messages: this model has no chat template; give a prompt instead"
    )
    assert prompt({"prompt": [104, 105]}) == "hi"
    assert prompt({"question": "hi"}) == "<hi>"
    assert prompt({"question": "hi"}, chat=False) == "hi"
    assert prompt({"question": "a {b} c"}, "Q: {question}\nA: {") == "Q: a {b} c\nA: {"
    assert prompt({"text": "add", "test_list": ["x", "y"]}, "{text}: {test_list}") == "add: x\ny"
    assert prompt({"prompt": "hi"}, "{question}") == "hi"
    assert prompt({"prompt": "hi"}, "# {prompt}") == "# hi"


def test_a_bad_line_becomes_an_error_record_and_the_run_goes_on(cpu: DeviceProfile, run: RunConfig) -> None:
    bad: Lines = ["{not json", "[1]", "[" * 100_000]
    bad += [{"id": "none"}, {"id": "two", "prompt": "a", "question": "b"}, {"id": "type", "prompt": 3}]
    bad += [
        {"id": [1], "prompt": "a"},
        {"id": "m", "messages": [{"role": "user"}]},
        {"id": "long", "prompt": "a" * 201},
    ]
    write_input(run, [{"id": "first", "prompt": "a"}, *bad, {"id": "last", "prompt": "b"}])
    metrics = execute(cpu, run)
    by_id = {record["id"]: record for record in records(run)}
    assert metrics is not None and metrics["requests"] == {
        "finished": 2,
        "errors": len(bad),
        "finish_reasons": {"eos": 2},
    }
    assert by_id["first"]["text"] == "A" and by_id["last"]["text"] == "B"
    assert by_id["line-2"]["error"].startswith("line 2 is not valid JSON")
    assert by_id["two"]["error"] == "line 6: give exactly one of prompt, messages, question (found prompt, question)"
    assert by_id["long"]["error"] == "the prompt has 201 tokens, 200 fit"


def test_bytes_that_are_no_text_become_an_error_record(cpu: DeviceProfile, run: RunConfig) -> None:
    assert run.input is not None
    Path(run.input.path).write_bytes(
        b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "\xff"}\n{"id": "\\ud800", "prompt": "b"}'
    )
    execute(cpu, run)
    found = records(run)
    assert [record.get("text") for record in found] == ["A", "B", None]
    assert found[2]["error"].startswith("line 2 is not valid JSON: 'utf-8' codec")


def test_an_id_is_the_lines_own_or_its_number_and_keeps_its_type(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(
        run, [{"prompt": "a"}, "", {"id": 7, "prompt": "b"}, {"id": None, "prompt": "c"}, {"id": "é", "prompt": "d"}]
    )
    execute(cpu, run)
    assert [record["id"] for record in records(run)] == [1, 7, 4, "é"]


def test_two_lines_with_one_id_are_refused(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"}, {"id": "a", "prompt": "y"}])
    with pytest.raises(ConfigError, match="lines 1 and 3 have the same id 'a'"):
        execute(cpu, run)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"input": None}, "no input section"),
        ({"output": None}, "no output section"),
        ({"output": OutputConfig(path="in.jsonl")}, "must be different files"),
        ({"output": OutputConfig(path="o", metrics_path="in.jsonl")}, "must be different files"),
        ({"input": InputConfig(path="absent.jsonl")}, "absent.jsonl: no such input file"),
        ({"input": InputConfig(path="empty.jsonl")}, "empty.jsonl: the input file is empty"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    cpu: DeviceProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    run = RunConfig(model="m", input=InputConfig(path="in.jsonl"), output=OutputConfig(path="o.jsonl"))
    write_input(run, [{"prompt": "a"}])
    with pytest.raises(ConfigError, match=expected):
        execute(cpu, run.model_copy(update=change))


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.run.json", "o.metrics.json"])
def test_a_run_never_writes_over_its_input(cpu: DeviceProfile, tmp_path: Path, name: str) -> None:
    source, linked = tmp_path / "in.jsonl", tmp_path / name
    run = RunConfig(model="m", input=InputConfig(path=str(source)), output=OutputConfig(path=str(tmp_path / "o.jsonl")))
    write_input(run, [{"prompt": "a"}])
    linked.hardlink_to(source)
    before = source.read_bytes()
    with pytest.raises(ConfigError, match="must be different files"):
        execute(cpu, run, overwrite=True)
    assert source.read_bytes() == before


def test_an_output_that_is_no_regular_file_is_refused(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"prompt": "a"}])
    reader, writer = os.pipe()
    try:
        for path in ("/dev/null", f"/dev/fd/{writer}"):
            with pytest.raises(ConfigError, match=rf"{path}: output\.path is no regular file"):
                execute(cpu, run.model_copy(update={"output": OutputConfig(path=path)}))
    finally:
        os.close(reader)
        os.close(writer)


# What is written


def test_a_scorable_line_is_marked_and_keeps_its_kind(cpu: DeviceProfile, run: RunConfig) -> None:
    question = "#### 12"
    lines: Lines = [{"question": question, "final": 12, "kind": "math"}, {"question": question, "answer": "so #### 13"}]
    lines += [{"question": question, "answer": "no number"}, {"question": question, "final": "many"}]
    write_input(run, [*lines, {"question": question, "final": 1, "kind": 2}, {"question": question, "kind": [1]}])
    metrics = execute(cpu, run)
    first, second, third, fourth, *odd = records(run)
    assert not any("kind" in record for record in odd)
    assert (first["correct"], first["kind"], second["correct"]) == (True, "math", False)
    assert "correct" not in third and "kind" not in second
    assert "correct" not in fourth and "unscored" in fourth
    assert metrics is not None and metrics["accuracy"]["by_kind"]["math"]["share"] == 1
    assert (metrics["accuracy"]["correct"], metrics["accuracy"]["scored"]) == (1, 3)


def test_the_text_ends_before_a_stop_string(cpu: DeviceProfile, run: RunConfig) -> None:
    run = run.model_copy(update={"decode": DecodeConfig(stop=("END", "STOP"))})
    write_input(run, [{"prompt": "one stop two end"}])
    execute(cpu, run)
    assert records(run)[0]["text"] == "ONE "


def test_the_metrics_file_says_what_ran_and_what_its_numbers_mean(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"prompt": "abc"}])
    execute(cpu, run)
    metrics = json.loads(output_path(run).with_suffix(".metrics.json").read_text())
    assert metrics["environment"]["engine"] == "scripted"
    assert {"torch", "python", "commit", "profile", "seed", "lopa"} <= metrics["environment"].keys()
    assert metrics["run"]["decode"]["num_lookahead"] == 3
    assert "canvas" in metrics["definitions"]


# Resuming


def test_a_resumed_run_does_what_is_left_and_reports_all(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"id": number, "prompt": "abc"} for number in range(5)])
    with pytest.raises(Interrupted):
        run_batch(cpu, run, lambda: StopsAfter(cpu, run))
    assert len(records(run)) == 2
    metrics = execute(cpu, run)
    assert [record["id"] for record in records(run)] == [0, 1, 2, 3, 4]
    assert metrics is not None
    assert (metrics["requests"]["finished"], metrics["this_start"]["requests"]) == (5, 3)


def test_a_finished_run_loads_no_model_again(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"prompt": "abc"}])
    first = execute(cpu, run)

    def build() -> ScriptedGenerator:
        raise AssertionError("the model was loaded for nothing")

    assert run_batch(cpu, run, build) == without_this_start(first)


def test_metrics_of_other_records_are_not_taken_for_these(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"id": 0, "prompt": "abc"}])
    execute(cpu, run)
    write_input(run, [{"id": number, "prompt": "abc"} for number in range(5)])
    with pytest.raises(Interrupted):  # no metrics are written
        run_batch(cpu, run, lambda: StopsAfter(cpu, run))
    write_input(run, [{"id": number, "prompt": "abc"} for number in range(3)])
    metrics = execute(cpu, run)
    assert metrics is not None and metrics["requests"]["finished"] == 3
    assert json.loads(output_path(run).with_suffix(".metrics.json").read_text())["requests"]["finished"] == 3


def test_metrics_that_are_nested_too_deep_are_written_anew(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"id": 0, "prompt": "abc"}])
    first = execute(cpu, run)
    output_path(run).with_suffix(".metrics.json").write_text("[" * 100_000)
    again = execute(cpu, run)
    assert again is not None and first is not None and again["requests"] == first["requests"]


def test_an_output_is_overwritten_only_once_the_model_is_there(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"id": number, "prompt": "abc"} for number in range(3)])
    execute(cpu, run)
    before = records(run)

    def build() -> ScriptedGenerator:
        raise ConfigError("no such model")

    changed = run.model_copy(update={"decode": DecodeConfig(num_lookahead=1)})
    with pytest.raises(ConfigError, match="no such model"):
        run_batch(cpu, changed, build, overwrite=True)
    assert records(run) == before
    execute(cpu, run)  # it still belongs to the first run
    execute(cpu, changed, overwrite=True)
    assert len(records(run)) == 3
    execute(cpu, changed)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"input.target_field": "prompt"}, "input.target_field"),
        ({"output.step_map": True}, "output.step_map"),
        ({"pace": "balanced"}, "pace"),
    ],
)
def test_what_records_hold_depends_on(cpu: DeviceProfile, run: RunConfig, changes: dict[str, Any], key: str) -> None:
    write_input(run, [{"id": number, "prompt": "abc"} for number in range(3)])
    execute(cpu, run)
    changed = run
    for name, value in changes.items():
        section, _, own = name.rpartition(".")
        update = {section: getattr(run, section).model_copy(update={own: value})} if section else {own: value}
        changed = changed.model_copy(update=update)
    with pytest.raises(ConfigError, match=re.escape(key)):
        execute(cpu, changed)
    assert len(records(run)) == 3


def test_a_setting_newer_than_the_output_had_its_default(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"prompt": "abc"}])
    execute(cpu, run)
    sidecar = sidecar_path(output_path(run))
    identity = json.loads(sidecar.read_text())
    del identity["decode.shift_row"]
    sidecar.write_text(json.dumps(identity))
    execute(cpu, run)
    with pytest.raises(ConfigError, match="shift_row was 'stale', is 'fresh'"):
        execute(cpu, run.model_copy(update={"decode": DecodeConfig(shift_row="fresh")}))


def test_a_half_line_is_cut_off_and_done_again(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"id": number, "prompt": "x" * 100} for number in range(3)])
    execute(cpu, run)
    whole = output_path(run).read_bytes()
    for cut in (1, 50, len(whole) // 2, len(whole) - 1):
        output_path(run).write_bytes(whole[:cut])
        execute(cpu, run)
        assert Counter(record["id"] for record in records(run)) == Counter(range(3))


@pytest.mark.parametrize(
    "edit",
    [
        lambda record: {"id": record["id"]},
        lambda record: record | {"seconds": "1"},
        lambda record: record | {"steps": None},
        lambda record: record | {"seconds": 10**400},
        lambda record: record | {"windows": {"x": 1}},
        lambda record: record | {"id": [1]},
        lambda record: {"id": record["id"], "error": 5},
    ],
)
def test_a_record_that_somebody_has_edited_is_named_before_anything_is_decoded(
    cpu: DeviceProfile, run: RunConfig, edit: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    write_input(run, [{"prompt": "a"}, {"prompt": "b"}])
    execute(cpu, run)
    first, second = records(run)
    output_path(run).write_text(f"{json.dumps(first)}\n{json.dumps(edit(second))}\n")
    with pytest.raises(ConfigError, match=r"line 2 is not a result of a batch run: remove it, choose"):
        run_batch(cpu, run, lambda: pytest.fail("the model was loaded"))
    output_path(run).write_text(f"{json.dumps(first)}\n")
    execute(cpu, run)
    assert records(run)[0] == first and len(records(run)) == 2


def test_a_half_line_of_a_killed_writer_is_cut_off_by_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl"
    output = start_output(path, RUN, overwrite=False, retry_errors=False)
    output.append({"id": 1})
    with path.open("ab") as stream:
        stream.write(b'{"id": 2, "te')
    other = join_output(path)
    other.append({"id": 3})
    assert [record["id"] for record in read_records(path)] == [1, 3]


def test_a_write_that_stops_short_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = start_output(tmp_path / "o.jsonl", RUN, overwrite=False, retry_errors=False)
    output.append({"id": 1})
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    with pytest.raises(OSError, match="not written whole"):
        output.append({"id": 2})
    monkeypatch.undo()
    output.append({"id": 3})
    assert (tmp_path / "o.jsonl").read_text() == '{"id": 1}\n{"id": 3}\n'


def test_errors_are_final_unless_asked_to_be_tried_again(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y" * 300}])
    execute(cpu, run)
    execute(cpu, run)
    assert [record["id"] for record in records(run)] == ["a", "b"]
    assert execute(cpu, run, retry_errors=True) is not None
    assert Counter(record["id"] for record in records(run)) == Counter(["a", "b"])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seed": 5}, "seed was 0, is 5"),
        ({"model": "other"}, "model was 'm', is 'other'"),
        ({"decode": DecodeConfig(num_lookahead=7)}, "decode.num_lookahead was 3, is 7"),
    ],
)
def test_a_resume_under_other_settings_is_refused(
    cpu: DeviceProfile, run: RunConfig, change: dict[str, Any], expected: str
) -> None:
    write_input(run, [{"prompt": "abc"}])
    execute(cpu, run)
    with pytest.raises(ConfigError, match=expected + r".*choose another output.path, or pass --overwrite"):
        execute(cpu, run.model_copy(update=change))
    assert execute(cpu, run.model_copy(update=change), overwrite=True) is not None
    assert len(records(run)) == 1


def test_lines_may_be_added_to_the_input_but_not_changed(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"prompt": "a"}])
    execute(cpu, run)
    write_input(run, [{"prompt": "a"}, {"prompt": "b"}])
    execute(cpu, run)
    assert [record["text"] for record in records(run)] == ["A", "B"]
    write_input(run, [{"prompt": "z"}, {"prompt": "b"}])
    with pytest.raises(ConfigError, match="input_sha256"):
        execute(cpu, run)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("content", ["a diary", "a diary\n", '{"id": 1, "prompt": "a"}\n', "5\n", "[" * 10_000 + "\n"])
def test_a_file_that_is_not_ours_is_left_alone(
    cpu: DeviceProfile, run: RunConfig, content: str, overwrite: bool
) -> None:
    write_input(run, [{"prompt": "a"}])
    output_path(run).parent.mkdir()
    output_path(run).write_text(content)
    with pytest.raises(ConfigError, match=r"is not the output of a batch run: choose another output\.path$"):
        execute(cpu, run, overwrite=overwrite)
    assert output_path(run).read_text() == content
    assert not sidecar_path(output_path(run)).exists()


def test_results_whose_run_nobody_knows_are_dropped_where_that_is_asked_for(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"prompt": "a"}])
    execute(cpu, run)
    sidecar_path(output_path(run)).unlink()
    with pytest.raises(
        ConfigError, match=r"run\.json, which says of what run, does not: choose .* or pass --overwrite"
    ):
        execute(cpu, run)
    assert execute(cpu, run, overwrite=True) is not None


def test_two_runs_never_write_to_one_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.batch.sidecar.LOCK_WAIT_S", 0.3)
    output: OutputFile = start_output(tmp_path / "o", RUN, overwrite=False, retry_errors=False)
    with pytest.raises(ConfigError, match="another run is writing to it"):
        start_output(tmp_path / "o", RUN, overwrite=False, retry_errors=False)
    output.close()
    start_output(tmp_path / "o", RUN, overwrite=False, retry_errors=False).close()


def test_each_setting_of_a_sweep_has_its_own_resumable_output(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"question": "#### 4", "final": 4}])
    settings = {"k = 0": DecodeConfig(num_lookahead=0), "k = 7": DecodeConfig(num_lookahead=7)}
    rows = evaluate_sweep(sweep_of(cpu, run, settings), lambda: ScriptedGenerator(cpu, run), num_shown=1)
    folder = output_path(run).with_suffix("")
    assert {path.name for path in folder.glob("*.jsonl")} == {"k-0.jsonl", "k-7.jsonl"}
    tpf = [row["metrics"]["tpf"]["effective"]["total"] for row in rows]
    assert tpf[0] < tpf[1]
    assert (folder / "sweep.md").read_text().count("\n") == 4
    assert json.loads((folder / "sweep.json").read_text())["rows"][1]["decode"]["num_lookahead"] == 7


# Kills and signals, in processes of their own


def start(tmp_path: Path, *arguments: str, delay: float = 0.004, stand_at: int = 60) -> subprocess.Popen[str]:
    """Start a run that stands still at its 60th request unless told otherwise, so that nobody comes too late to disturb
    it."""
    (tmp_path / "p.yaml").write_text("name: p\nengine: lopa_cuda\ndevice: cpu\n")
    (tmp_path / "r.yaml").write_text("model: m\ninput: {path: in.jsonl}\noutput: {path: o.jsonl}\n")
    command = [sys.executable, str(SCRIPTED), "run", "--profile", "p.yaml", "r.yaml", *arguments]
    environment = {**os.environ, "SCRIPTED_DELAY": str(delay), "SCRIPTED_STAND": str(stand_at)}
    return subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "no results appeared"
        time.sleep(0.01)


def write_questions(tmp_path: Path, count: int) -> None:
    lines = [json.dumps({"id": f"q{number}", "prompt": f"{number} " * 20}) for number in range(count)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_a_run_killed_at_random_moments_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    write_questions(tmp_path, 400)
    rng = random.Random(0)
    num_done = 0
    for _ in range(4):
        process = start(tmp_path)
        wait_for_lines(tmp_path / "o.jsonl", num_done + 1)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.communicate()
        num_done = (tmp_path / "o.jsonl").read_bytes().count(b"\n")
    assert num_done <= 4 * 60
    process = start(tmp_path, delay=0, stand_at=400)
    assert process.wait(240) == 0, process.communicate()
    found = Counter(json.loads(line)["id"] for line in (tmp_path / "o.jsonl").read_text().splitlines())
    assert found == Counter(f"q{number}" for number in range(400))


@pytest.mark.parametrize(("signal_number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_cleanly_and_keeps_what_is_done(
    tmp_path: Path, signal_number: signal.Signals, exit_code: int
) -> None:
    write_questions(tmp_path, 300)
    process = start(tmp_path)
    wait_for_lines(tmp_path / "o.jsonl", 3)
    process.send_signal(signal_number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == exit_code
    assert "Traceback" not in errors
    done = (tmp_path / "o.jsonl").read_text()
    assert done.endswith("\n")
    assert f"stopped by {signal_number.name}; {len(done.splitlines())} of 300 requests are done" in errors
