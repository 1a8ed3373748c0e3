"""The `lopa` command: help for newcomers, one sentence for a mistake, exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import started
from started import python

ROOT = Path(__file__).resolve().parents[3]
SCRIPTED = ROOT / "tests/scripted.py"


def lopa(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(SCRIPTED, *arguments, cwd=tmp_path)


def write_run(tmp_path: Path, text: str = "model: m\ninput: {path: in.jsonl}\noutput: {path: o.jsonl}\n") -> None:
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "in.jsonl").write_text('{"prompt": "hello"}\n')


COMMANDS = ("run", "evaluate", "parity", "doctor")


def test_the_help_names_every_command(tmp_path: Path) -> None:
    printed = lopa(tmp_path, "--help").stdout
    assert all(command in printed for command in COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(tmp_path: Path, command: str) -> None:
    help = lopa(tmp_path, command, "--help")
    assert help.returncode == 0
    assert "Usage" in help.stdout


def test_a_run_writes_results_metrics_and_on_request_a_table(tmp_path: Path) -> None:
    write_run(tmp_path)
    arguments = ("run", "--profile", "cpu", "run.yaml", "--set", "decode.num_lookahead=1")
    result = lopa(tmp_path, *arguments)
    assert result.returncode == 0, result.stderr
    assert "1 request finished, 0 errors" in result.stdout and "TPF, mean of requests" not in result.stdout
    assert "TPF, mean of requests" in lopa(tmp_path, *arguments, "--details").stdout
    assert "HELLO" in (tmp_path / "o.jsonl").read_text()
    assert (tmp_path / "o.metrics.json").is_file()


@pytest.mark.slow
def test_a_run_of_bad_lines_only_says_so_at_its_end(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": 3}\n{"text": "a"}\n')
    for _ in range(2):  # started again, nothing is left to do and nothing is better
        result = lopa(tmp_path, "run", "--profile", "cpu", "run.yaml")
        assert result.returncode == 2
        assert "lopa: o.jsonl: none of 2 requests could be decoded. " in result.stderr
        assert "Traceback" not in result.stderr
    assert (tmp_path / "o.jsonl").read_text().count("error") == 2
    assert (tmp_path / "o.metrics.json").is_file()


@pytest.mark.slow
def test_a_row_that_the_model_cannot_do_is_named_with_its_file(tmp_path: Path) -> None:
    write_run(tmp_path, f"model: {ROOT / 'models/demo'}\ninput: {{path: in.jsonl}}\noutput: {{path: o.jsonl}}\n")
    (tmp_path / "sweep.yaml").write_text("rows: [{name: odd, decode: {eos_token_id: 99999}}]\n")
    result = started.lopa("evaluate", "-p", "cpu", "run.yaml", "sweep.yaml", cwd=tmp_path)
    assert result.returncode == 2
    assert "sweep.yaml: row 'odd': decode.eos_token_id 99999 is no token" in result.stderr


def test_a_sweep_does_not_take_a_file_for_its_folder(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "sweep.yaml").write_text("rows: [{name: a}]\n")
    (tmp_path / "results").write_text("")
    result = lopa(tmp_path, "evaluate", "-p", "cpu", "run.yaml", "sweep.yaml", "--set", "output.path=results")
    assert result.returncode == 2
    assert "results go to the folder results, which is a file; change it" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--profile", "nope", "run.yaml"], "lopa: nope: no such file, and not one of the profiles in"),
        (
            ["run", "--profile", "cpu", "nope.yaml"],
            "lopa: nope.yaml: no such file or folder, and not one of the runs in",
        ),
        (["run", "-p", "cpu", "run.yaml", "--set", "decode.block_size=0"], "lopa: --set decode.block_size=0: decode"),
        (["run", "-p", "cpu", "run.yaml", "--set", "input.path=q"], "lopa: q: no such input file; give a JSONL file"),
        (["run", "-p", "cpu_bp2", "run.yaml"], "lopa: profile cpu_bp2 wants 2 processes"),
        (
            ["run", "-p", "cpu", "run.yaml", "--set", "output.path=in.jsonl"],
            "lopa: input.path, output.path, output.metrics_path",
        ),
        (["run", "-p", "cpu", "run.yaml", "--set", "output.path=/proc/x"], "lopa: "),
        (["run", "-p", "cpu", "run.yaml", "--set", 'model="a\\0b"'], "lopa: model 'a\\x00b' is no name of a file"),
        (["run", "-p", "cpu", "run.yaml", "--set", 'lora_path="a\\0b"'], "lopa: lora_path 'a\\x00b' is no name"),
        (["run", "-p", "cpu", "run.yaml", "--set", 'tokenizer="a\\0b"'], "lopa: tokenizer 'a\\x00b' is no name"),
        (
            ["run", "-p", "cpu", "run.yaml", "--set", 'decode.stop=["a\\uD800"]'],
            "lopa: --set decode.stop=[\"a\\uD800\"]: decode.stop: 'a\\ud800' holds half a surrogate pair",
        ),
        (
            ["run", "-p", "cpu", "run.yaml", "--set", 'environment={A: "\\uD800"}'],
            "lopa: --set environment={A: \"\\uD800\"}: environment.A: '\\ud800' holds half a surrogate pair",
        ),
        (["evaluate", "-p", "cpu", "run.yaml", "run.yaml"], "lopa: run.yaml: model: unknown key"),
        (["doctor", "-p", "nope"], "lopa: nope: no such file, and not one of the profiles"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    write_run(tmp_path)
    result = lopa(tmp_path, *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "abc"], "--port: 'abc' is no port; give a number from 0 to 65535"),
        (["--port", "99999"], "--port: '99999' is no port; give a number from 0 to 65535"),
        (["--port", "-1"], "--port: '-1' is no port; give a number from 0 to 65535"),
        (["--host", ""], "--host: it is empty; name one"),
        (["--api-key-file", ""], "--api-key-file: it is empty; name one"),
        (["--api-key-file", "null"], "null: the API keys cannot be read"),
        (["--api-key-file", "."], ".: the API keys cannot be read"),
        (["--host", "203.0.113.7", "--port", "0"], "203.0.113.7:0 cannot be listened on"),
        (["--host", "h\u00fc..x", "--port", "0"], "h\u00fc..x:0 cannot be listened on"),
    ],
)
def test_an_address_or_keys_that_cannot_be_had_are_one_sentence(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    write_run(tmp_path)
    result = lopa(tmp_path, "serve", "--profile", "cpu", "run.yaml", *arguments)
    assert result.returncode == 2 and result.stderr.startswith(f"lopa: {sentence}"), result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (
            ["trace", "run.yaml", "hello"],
            "this command runs in one process, so name a profile of one with --profile, such as cpu",
        ),
        (["serve", "run.yaml"], "start it with scripts/serve.sh"),
        (["run", "run.yaml"], "start it with scripts/run_batch.sh"),
    ],
)
def test_a_profile_of_several_processes_is_told_what_starts_it(
    tmp_path: Path, arguments: list[str], remedy: str
) -> None:
    write_run(tmp_path)
    result = lopa(tmp_path, *arguments, "--profile", "cpu_bp2")
    assert result.returncode == 2 and f"wants 2 processes (dp 1 x bp 2 x tp 1) but 1 was started: {remedy}" in (
        result.stderr
    )
    assert result.stderr.count("\n") == 1


def test_a_forgotten_argument_is_named(tmp_path: Path) -> None:
    result = lopa(tmp_path, "run")
    assert result.returncode == 2
    assert "MODEL" in result.stderr


@pytest.mark.parametrize(("kind", "error"), [("defect", "KeyError: 'a defect'"), ("value", "ValueError: a defect")])
def test_a_defect_still_shows_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: str
) -> None:
    """So does a ValueError that nobody has made a ConfigError."""
    write_run(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    monkeypatch.setenv("SCRIPTED_FAIL", f"0:{kind}")
    result = lopa(tmp_path, "run", "-p", "cpu", "run.yaml")
    assert result.returncode == 1
    assert "Traceback" in result.stderr and error in result.stderr


@pytest.mark.slow
def test_a_run_that_is_done_says_nothing_of_an_earlier_start(tmp_path: Path) -> None:
    write_run(tmp_path)
    arguments = ("run", "--profile", "cpu", "run.yaml")
    assert "this start: 1 request in" in lopa(tmp_path, *arguments).stdout
    for details in ((), ("--details",)):
        again = lopa(tmp_path, *arguments, *details)
        assert again.returncode == 0
        assert "this start" not in again.stdout and "1 request finished" in again.stdout
    assert '"this_start"' in (tmp_path / "o.metrics.json").read_text()  # as the start that decoded measured it


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_launchers_variable_that_is_no_number_is_one_sentence(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")  # else it is of an operator's pod, and read by nobody
    monkeypatch.setenv(name, "two")
    result = lopa(tmp_path, "run", "-p", "cpu", "run.yaml")
    assert result.returncode == 2, result.stderr
    assert f"{name} is 'two', which a launcher sets to a number: unset it" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_missing_trace_is_one_sentence_too(tmp_path: Path) -> None:
    result = started.lopa("parity", tmp_path / "absent.json")
    sentence = f"lopa: {tmp_path}/absent.json: no such file; name a trace, a JSON file\n"
    assert (result.returncode, result.stderr) == (2, sentence)


def test_a_terminal_without_the_letters_of_a_run_gets_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: m\ninput: {path: ü.jsonl}\noutput: {path: ü.out}\n", encoding="utf-8")
    (tmp_path / "ü.jsonl").write_text('{"prompt": "#### 5", "final": 5}\n')
    environment = {"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "1"}
    result = python(SCRIPTED, "run", "--profile", "cpu", "run.yaml", cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert r"results in \xfc.out" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"])
def test_closed_descriptors_are_no_reason_to_end(tmp_path: Path, closed: str) -> None:
    """What is opened does not take their place either, so nothing is written into a record."""
    write_run(tmp_path)
    command = [sys.executable, str(SCRIPTED), "run", "--profile", "cpu", "run.yaml"]
    shell = f'exec "$@" {closed}'
    done = subprocess.run(["bash", "-c", shell, "bash", *command], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "o.jsonl").read_text().splitlines()
    assert json.loads(line)["id"] == 1
    (tmp_path / "run.yaml").write_text("model: m\nwrong: 1\n")
    done = subprocess.run(["bash", "-c", shell, "bash", *command], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 2, "a mistake is still one"


def test_standard_input_that_is_closed_is_said(tmp_path: Path) -> None:
    write_run(tmp_path)
    arguments = ["run", "--profile", "cpu", "run.yaml", "--set", "input.path=-"]
    command = ["bash", "-c", 'exec "$@" 0<&-', "bash", sys.executable, str(SCRIPTED), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "standard input is closed" in done.stderr


def test_a_working_directory_that_was_deleted_is_said(tmp_path: Path) -> None:
    command = ["bash", "-c", 'rmdir "$PWD" && exec "$@"', "bash", sys.executable, "-m", "common.commands", "doctor"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "working directory was deleted" in done.stderr
