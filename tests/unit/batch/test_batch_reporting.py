"""What a run shows: lines in a log, a bar on a terminal, a short summary; and records that any reader can split."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from batch_files import execute, output_path, records, write_input
from started import python

from common.batch import metrics_path, print_summary, print_table, progress, require_some_finished
from common.batch.output import start_output
from common.batch.progress import Progress
from common.config import DeviceProfile, RunConfig
from common.decoding import Completion
from common.errors import ConfigError
from common.scoring import request_record, summarize, summarize_start
from common.tables import markdown

SCRIPTED = Path(__file__).parents[2] / "scripted.py"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    return now


def finished(id: int) -> dict[str, Any]:
    return {"id": id, "effective_tokens": 30, "tpf_effective": 3.0, "tps_effective": 15.0}


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "common.batch.progress"]


def test_a_log_has_a_line_at_the_start_one_every_ten_seconds_and_one_at_the_end(
    tmp_path: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    output = start_output(tmp_path / "o.jsonl", {}, overwrite=False, retry_errors=False)
    output.append({"id": "earlier", "error": "x"})
    shown = Progress(output.path, 100)
    name = str(output.path)
    assert lines_of(caplog) == [f"{name}: 1 of 101 requests"]
    for number in range(21):
        clock[0] += 1
        output.append(finished(number))
        shown.update()
    assert lines_of(caplog)[1:] == [
        f"{name}: 11 of 101 requests, TPF 3.00, 15.0 tokens/s a request, 30.0 together, ETA 0:01:30",
        f"{name}: 21 of 101 requests, TPF 3.00, 15.0 tokens/s a request, 30.0 together, ETA 0:01:20",
    ]
    shown.close()
    shown.close()
    last = f"{name}: 22 of 101 requests, TPF 3.00, 15.0 tokens/s a request, 30.0 together, ETA 0:01:19"
    assert lines_of(caplog)[3:] == [last]
    assert (shown.done, shown.total) == (22, 101)


def test_progress_and_summary_have_one_definition_of_speed(
    tmp_path: Path, clock: list[float], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Means of the requests' ratios, not ratios of sums, which would be 4.00 and 1.5."""
    caplog.set_level(logging.INFO)
    output = start_output(tmp_path / "o.jsonl", {}, overwrite=False, retry_errors=False)
    shown = Progress(output.path, 2)
    for number, (steps, seconds) in enumerate([(10, 30.0), (5, 10.0)]):
        ids = (7,) * 30
        completion = Completion(str(number), 4, ids, ids, 30, steps, 0, "eos", 1.0, seconds)
        output.append(request_record(number, "", completion))
    clock[0] += 40
    shown.update()
    assert lines_of(caplog)[-1].endswith(", TPF 4.50, 2.0 tokens/s a request, 1.5 together")
    print_summary("title", {**summarize(shown.records), "this_start": summarize_start(shown.records, 40.0)})
    said = capsys.readouterr().out
    assert "TPF 4.50 effective" in said and "\n2.0 tokens/s a request, 1.5 together (this start: 2 requests" in said


def test_a_record_that_another_writer_doubles_is_no_progress(tmp_path: Path, clock: list[float]) -> None:
    output = start_output(tmp_path / "o.jsonl", {}, overwrite=False, retry_errors=False)
    output.append(finished(1))
    shown = Progress(output.path, 2)
    for number in (1, 2, 2):
        output.append(finished(number))
    shown.update()
    assert (shown.done, shown.total, len(shown.records)) == (2, 3, 1)


def test_a_foreign_line_in_the_output_is_named(tmp_path: Path, clock: list[float]) -> None:
    output = start_output(tmp_path / "o.jsonl", {}, overwrite=False, retry_errors=False)
    shown = Progress(output.path, 2)
    output.path.write_text("a diary\n")
    with pytest.raises(ConfigError, match=r"o\.jsonl: a line is not a result of a batch run"):
        shown.update()


def start_run(tmp_path: Path) -> list[str]:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"id": {n}, "prompt": "abc"}}\n' for n in range(3)))
    (tmp_path / "run.yaml").write_text("model: m\ninput: {path: in.jsonl}\noutput: {path: o.jsonl}\n")
    return [str(SCRIPTED), "run", "-p", "cpu", "run.yaml"]


def test_where_there_is_no_terminal_progress_is_plain_lines(tmp_path: Path) -> None:
    result = python(*start_run(tmp_path), cwd=tmp_path)
    first, *others, last = result.stderr.splitlines()
    assert first == "lopa: o.jsonl: 0 of 3 requests"
    speed = "80.0 tokens/s a request"
    assert re.fullmatch(rf"lopa: o.jsonl: 3 of 3 requests, TPF 2.00, {speed}, [\d.]+ together", last)
    assert all(" of 3 requests" in line for line in others), "what takes long has more of them"
    assert "\nTPF 2.00 effective" in result.stdout and f"\n{speed}, " in result.stdout, "the summary says the same"


def test_on_a_terminal_there_is_a_bar(tmp_path: Path) -> None:
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, *start_run(tmp_path)], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=terminal
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    assert process.wait(240) == 0
    os.close(main)
    assert b"3/3" in shown and b"TPF 2.00, 80.0 tokens/s a request, " in shown
    assert b"3 of 3 requests" not in shown


# The summary


@pytest.mark.parametrize("scored", [True, False])
def test_the_summary_is_short_and_the_table_comes_on_request(
    cpu: DeviceProfile, run: RunConfig, capsys: pytest.CaptureFixture[str], scored: bool
) -> None:
    lines = [{"question": "#### 4", **({"final": 4} if scored else {})}, {"prompt": "x" * 201}]
    write_input(run, lines)
    metrics = execute(cpu, run)
    assert metrics is not None
    print_summary("results in o.jsonl, metrics in o.metrics.json", metrics)
    short = capsys.readouterr().out
    assert 3 <= short.count("\n") <= 6
    expected = ["1 request finished, 1 error", "TPF", "tokens/s", "latency", "results in o.jsonl", "o.metrics.json"]
    assert all(part in short for part in expected)
    assert ("accuracy 100.0 ± 0.0 % (1 of 1)" in short) == scored
    assert "--details" in short and "canvas:" not in short
    print_summary("title", metrics, details=True)
    long = capsys.readouterr().out
    assert "TPF, mean of requests" in long and "canvas: every generated position counts" in long


@pytest.mark.parametrize("details", [False, True])
def test_of_texts_that_were_only_scored_no_speed_is_told(capsys: pytest.CaptureFixture[str], details: bool) -> None:
    nothing = Completion("a", 4, (), (), 0, 3, 0, "length", 0.0, 0.0)
    metrics = summarize([{**request_record("a", "", nothing), "finish_reason": "scored"}])
    print_summary("results in o.jsonl", metrics, details=details)
    assert capsys.readouterr().out == "1 request finished, 0 errors\nresults in o.jsonl\n"


@pytest.mark.slow
def test_details_are_an_option_of_the_command(tmp_path: Path) -> None:
    command = start_run(tmp_path)
    short = python(*command, cwd=tmp_path)
    assert short.stdout.splitlines()[0] == "3 requests finished, 0 errors"
    assert short.stdout.splitlines()[-1].startswith("results in o.jsonl, metrics in o.metrics.json")
    long = python(*command, "--details", cwd=tmp_path)
    assert "TPS, mean of the 10 best, without first step" in long.stdout


def test_where_all_requests_are_refused_both_ways_on_are_named(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"id": "long", "prompt": "x" * 201}])
    metrics = execute(cpu, run)
    assert metrics is not None
    with pytest.raises(
        ConfigError, match=r"decoded\. long: the prompt .*\. Correct .*--retry-errors where .* else with --overwrite"
    ):
        require_some_finished(run, metrics)


# Records


def test_a_record_is_one_line_to_every_reader(cpu: DeviceProfile, run: RunConfig) -> None:
    ends = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\n"
    write_input(run, [{"id": f"a{ends}b", "prompt": f"x{ends}y é 你"}])
    execute(cpu, run)
    text = output_path(run).read_text(encoding="utf-8")
    assert len(text.splitlines()) == 1
    assert "É 你" in text  # all else stays readable
    (record,) = records(run)
    assert record["id"] == f"a{ends}b" and record["text"] == f"X{ends}Y É 你"
    assert json.loads(re.sub(r"\s+$", "", text)) == record


def test_half_a_surrogate_pair_in_a_kind_ends_in_the_metrics(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"id": "\ud800", "prompt": "#### 5", "final": 5, "kind": "\ud83d"}])
    metrics = execute(cpu, run)
    assert metrics is not None and list(metrics["accuracy"]["by_kind"]) == ["\ud83d"]
    assert run.output is not None
    assert json.loads(metrics_path(run.output).read_text(encoding="utf-8")) == json.loads(json.dumps(metrics))
    assert [record["id"] for record in records(run)] == ["\ud800"]


def test_a_name_is_no_markup_of_a_table() -> None:
    """Nor another column, nor another row."""
    table = markdown(
        ["setting", "n"],
        [["a|b\nc", "1"], ["<img src=x>", "2"], ["[x](y) *z* `w`", "3"], ["k_1 = 2", "4"]],
        is_aligned=False,
    )
    lines = table.splitlines()
    assert lines[2:] == [
        r"| a\|b c | 1 |", "| &lt;img src=x> | 2 |", r"| \[x\](y) \*z\* \`w\` | 3 |", "| k_1 = 2 | 4 |",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["[/x]", "[red]a", ":smile:", "a\x1b[2J\x07\x9b"])
def test_a_name_in_a_table_is_neither_markup_nor_steers_the_terminal(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_table([name], [[name]], [name])
    shown = name.encode("unicode_escape").decode()
    assert capsys.readouterr().out.count(shown) == 3
    assert markdown(["a"], [[name]]).count("\x1b") == 0
