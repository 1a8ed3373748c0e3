"""Where requests come from: growing files, standard input, pipes, gzip; and what is no JSON Lines at all."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import logging
import lzma
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_files import execute, output_path, records, sweep_of, write_input
from scripted import ScriptedGenerator

from common.batch import check_input, read_lines, run_batch, source
from common.batch.files import sidecar_path
from common.config import DecodeConfig, DeviceProfile, InputConfig, RunConfig
from common.errors import ConfigError
from common.evaluation import evaluate_sweep

SCRIPTED = Path(__file__).parents[2] / "scripted.py"
LINES = b'{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "y"}\n'


@pytest.fixture(autouse=True)
def nothing_read_before() -> Iterator[None]:
    source._read_whole.cache_clear()
    yield
    source._read_whole.cache_clear()


def from_path(run: RunConfig, path: Path | str, **changes: Any) -> RunConfig:
    assert run.input is not None
    return run.model_copy(update={"input": run.input.model_copy(update={"path": str(path), **changes})})


def from_stdin(run: RunConfig, content: bytes, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    source._read_whole.cache_clear()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    return from_path(run, "-")


def input_path(run: RunConfig) -> Path:
    assert run.input is not None
    return Path(run.input.path)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def fail_to_build() -> ScriptedGenerator:
    raise AssertionError("a model was loaded for nothing")


# A last line that is half there


@pytest.mark.parametrize(
    "half", [b"{", b'{"id": "c", "pro', b'{"id": "c", "prompt": "\xc3', b'{"id": "c"', b"[" * 9999]
)
def test_a_half_written_last_line_is_left_for_the_next_start(
    cpu: DeviceProfile, run: RunConfig, caplog: pytest.LogCaptureFixture, half: bytes
) -> None:
    input_path(run).write_bytes(LINES + half)
    metrics = execute(cpu, run)
    assert metrics is not None and metrics["requests"] == {"finished": 2, "errors": 0, "finish_reasons": {"eos": 2}}
    assert len(warnings_of(caplog)) == 1 and "line 3, the last, is not whole yet" in warnings_of(caplog)[0]
    execute(cpu, run)  # it may stay as it is,
    input_path(run).write_bytes(LINES + b'{"id": "c", "prompt": "\xc3\xa9"}\n{"id": "d", "prompt": "z"}\n')
    execute(cpu, run)  # go on, or be taken back and written anew
    assert [record["id"] for record in records(run)] == ["a", "b", "c", "d"]
    assert not any("error" in record for record in records(run))


def test_a_last_line_without_an_end_counts_if_it_is_whole(
    cpu: DeviceProfile, run: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    input_path(run).write_bytes(LINES.rstrip(b"\n"))
    execute(cpu, run)
    assert [record["id"] for record in records(run)] == ["a", "b"]
    input_path(run).write_bytes(LINES + b'{"id": "c", "prompt": "z"}')
    execute(cpu, run)
    assert [record["id"] for record in records(run)] == ["a", "b", "c"]
    assert not warnings_of(caplog)


def test_a_bad_line_that_is_whole_is_an_error_record(cpu: DeviceProfile, run: RunConfig) -> None:
    input_path(run).write_bytes(LINES + b'{"id": "c", "pro\n')
    execute(cpu, run)
    assert records(run)[-1]["id"] == "line-3" and "not valid JSON" in records(run)[-1]["error"]


def test_null_is_absent_and_variables_of_a_template_need_a_conversation(cpu: DeviceProfile, run: RunConfig) -> None:
    line = '{"id": "%s", "prompt": "a", "messages": null, "chat_template_kwargs": %s}\n'
    input_path(run).write_text(line % ("good", "null") + line % ("bad", '{"x": 1}'))
    execute(cpu, run)
    found = {record["id"]: record.get("error") for record in records(run)}
    assert found["good"] is None and "only conversations are rendered by a template" in found["bad"]


def test_an_input_of_half_a_line_is_empty_yet(cpu: DeviceProfile, run: RunConfig) -> None:
    input_path(run).write_bytes(b'{"id": "c", "pro')
    with pytest.raises(ConfigError, match="the input file is empty"):
        run_batch(cpu, run, fail_to_build)


def test_a_half_line_that_an_earlier_version_counted_in_is_still_the_same_input(
    cpu: DeviceProfile, run: RunConfig
) -> None:
    import hashlib

    whole = LINES + b'{"id": "c", "pro'
    input_path(run).write_bytes(whole)
    execute(cpu, run)
    sidecar = sidecar_path(output_path(run))
    earlier = {"input_bytes": len(whole), "input_sha256": hashlib.sha256(whole).hexdigest()}
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), **earlier}))
    execute(cpu, run)
    input_path(run).write_bytes(whole + b'mpt": "z"}\n')
    execute(cpu, run)
    assert [record["id"] for record in records(run)] == ["a", "b", "c"]


def test_a_half_line_beyond_the_limit_is_not_looked_at(
    cpu: DeviceProfile, run: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    input_path(run).write_bytes(LINES + b'{"id": "c", "pro')
    execute(cpu, from_path(run, input_path(run), limit=2))
    assert not warnings_of(caplog)


def test_more_lines_than_the_limit_are_compared_at_the_next_start(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"prompt": "a"}, {"prompt": "b"}])
    execute(cpu, from_path(run, input_path(run), limit=1))
    write_input(run, [{"prompt": "a"}, {"prompt": "changed"}])
    with pytest.raises(ConfigError, match="input_sha256"):
        execute(cpu, run)


# Standard input and pipes


def test_requests_come_from_standard_input_and_resume_with_the_same_content(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(cpu, from_stdin(run, LINES, monkeypatch))
    assert [record["text"] for record in records(run)] == ["X", "Y"]
    run_batch(cpu, from_stdin(run, LINES, monkeypatch), fail_to_build)
    execute(cpu, from_stdin(run, LINES + b'{"id": "c", "prompt": "z"}\n', monkeypatch))
    assert [record["id"] for record in records(run)] == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="input_sha256"):
        execute(cpu, from_stdin(run, LINES.replace(b"x", b"z"), monkeypatch))


def test_a_file_with_the_content_of_a_pipe_is_the_same_input(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(cpu, from_stdin(run, gzip.compress(LINES), monkeypatch))
    input_path(run).write_bytes(LINES)
    run_batch(cpu, run, fail_to_build)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "standard input: the input file is empty"),
        (b"\n \n", "standard input: the input file is empty"),
        (LINES + LINES, "standard input: lines 1 and 3 have the same id 'a'"),
    ],
)
def test_what_is_wrong_with_standard_input_is_said_of_it(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch, content: bytes, sentence: str
) -> None:
    changed = from_stdin(run, content, monkeypatch)
    assert changed.input is not None
    with pytest.raises(ConfigError, match=sentence):
        read_lines(changed.input)


def test_a_closed_standard_input_is_one_sentence(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="standard input is closed"):
        read_lines(InputConfig(path="-"))


def test_a_named_pipe_is_read_once_for_all_settings_of_a_sweep(
    cpu: DeviceProfile, run: RunConfig, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(LINES,), daemon=True)
    writer.start()
    settings = {"k0": DecodeConfig(num_lookahead=0), "k7": DecodeConfig(num_lookahead=7)}
    changed = from_path(run, pipe)
    rows = evaluate_sweep(sweep_of(cpu, changed, settings), lambda: ScriptedGenerator(cpu, run), num_shown=1)
    assert [row["metrics"]["requests"]["finished"] for row in rows] == [2, 2]
    writer.join(10)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["cat data | {run} --set input.path={q}-{q}", "{run} --set input.path=<(cat data)"])
def test_the_command_reads_pipes_of_a_shell(tmp_path: Path, command: str) -> None:
    (tmp_path / "data").write_bytes(gzip.compress(LINES))
    (tmp_path / "run.yaml").write_text("model: m\ninput: {path: in.jsonl}\noutput: {path: o.jsonl}\n")
    run = f"{sys.executable} {SCRIPTED} run -p cpu run.yaml"
    line = command.format(run=run, q='\\"')
    result = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "2 requests finished, 0 errors" in result.stdout
    assert (tmp_path / "o.jsonl").read_text().count("\n") == 2


def test_several_processes_cannot_share_what_is_read_once(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("-", str(tmp_path / "pipe")):
        check_input(InputConfig(path=path))  # one process: nothing is read, and nothing is wrong
        with pytest.raises(ConfigError, match="can be read only once, and 2 are to read it"):
            check_input(InputConfig(path=path), num_processes=2)
        for rank in ("0", "1"):
            monkeypatch.setenv("WORLD_SIZE", "2")
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("LOCAL_RANK", rank)
            with pytest.raises(ConfigError, match="can be read only once"):
                run_batch(cpu, from_path(run, path), fail_to_build)
        monkeypatch.undo()
    assert not output_path(run).exists()


def test_checking_an_input_reads_a_file(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(LINES + LINES)
    with pytest.raises(ConfigError, match="have the same id"):
        check_input(InputConfig(path=str(tmp_path / "in.jsonl")), num_processes=2)


@pytest.mark.parametrize(("path", "sentence"), [("/dev/zero", "/dev/zero: a device"), ("/", "/: a folder")])
def test_what_is_neither_a_file_nor_a_pipe_is_named(path: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_lines(InputConfig(path=path))


def test_an_input_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINES)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"in\.jsonl: Permission denied; give a JSONL file"):
        read_lines(InputConfig(path=str(path)))


# Packed, in other letters, or something else


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl", "in.gz"])
def test_gzip_is_unpacked_whatever_its_name(cpu: DeviceProfile, run: RunConfig, tmp_path: Path, name: str) -> None:
    parts = [gzip.compress(part) for part in LINES.splitlines(keepends=True)]
    (tmp_path / name).write_bytes(b"".join(parts))
    execute(cpu, from_path(run, tmp_path / name))
    assert [record["text"] for record in records(run)] == ["X", "Y"]
    (tmp_path / name).write_bytes(b"".join(parts) + gzip.compress(b'{"id": "c", "prompt": "z"}\n'))
    execute(cpu, from_path(run, tmp_path / name))
    assert [record["text"] for record in records(run)] == ["X", "Y", "Z"]


def zipped(content: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("in.jsonl", content)
    return packed.getvalue()


WIDE = LINES.decode()
PRETTY = json.dumps({"id": "a", "prompt": "x"}, indent=1).encode()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\x28\xb5\x2f\xfd" + bytes(20), "packed with zstd; pipe it in: zstd -dc FILE"),
        (zipped(LINES), "packed with zip; pipe it in: unzip -p"),
        (lzma.compress(LINES), "packed with xz"),
        (bz2.compress(LINES), "packed with bzip2"),
        (gzip.compress(gzip.compress(LINES)), "packed with gzip twice"),
        (WIDE.encode("utf-16"), "text in UTF-16; convert it to UTF-8"),
        (WIDE.encode("utf-16-le"), "text in UTF-16;"),
        (WIDE.encode("utf-16-be"), "text in UTF-16;"),
        (WIDE.encode("utf-32"), "text in UTF-32;"),
        (WIDE.encode("utf-32-be"), "text in UTF-32;"),
        (gzip.compress(WIDE.encode("utf-16")), "text in UTF-16;"),
        (LINES.replace(b"\n", b"\r"), "its lines end in a carriage return alone"),
        (b'[{"prompt": "x"}, {"prompt": "y"}]', "one JSON list; write one request a line"),
        (b'[\n{"prompt": "x"},\n{"prompt": "y"}\n]\n', "one JSON list;"),
        (PRETTY + b"\n", "JSON over several lines"),
    ],
    ids=[
        "zstd",
        "zip",
        "xz",
        "bzip2",
        "gzip-twice",
        "utf-16",
        "utf-16-le",
        "utf-16-be",
        "utf-32",
        "utf-32-be",
        "utf-16-in-gzip",
        "carriage-returns",
        "one-list",
        "list-over-lines",
        "pretty",
    ],
)
def test_what_is_no_json_lines_is_refused_before_a_model_is_loaded(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch, content: bytes, sentence: str
) -> None:
    input_path(run).write_bytes(content)
    with pytest.raises(ConfigError, match=f"in.jsonl: no JSON lines but {sentence}"):
        run_batch(cpu, run, fail_to_build)
    with pytest.raises(ConfigError, match=f"standard input: no JSON lines but {sentence}"):
        run_batch(cpu, from_stdin(run, content, monkeypatch), fail_to_build)
    assert not output_path(run).exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + LINES,
        LINES.replace(b"\n", b"\r\n"),
        b"\n\n" + LINES,
        LINES.replace(b'"x"}', b'"x"\r}'),
        LINES.replace(b"{", b" {"),
    ],
)
def test_odd_but_right_json_lines_are_read(cpu: DeviceProfile, run: RunConfig, content: bytes) -> None:
    input_path(run).write_bytes(content)
    execute(cpu, run)
    assert [record["text"] for record in records(run)] == ["X", "Y"]


def test_the_first_line_alone_may_be_bad(cpu: DeviceProfile, run: RunConfig) -> None:
    input_path(run).write_bytes(b"[1]\n" + LINES)
    execute(cpu, run)
    assert sorted("error" in record for record in records(run)) == [False, False, True]


def test_a_name_that_says_gzip_over_plain_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(LINES)
    with pytest.raises(ConfigError, match="the name says gzip, the content does not"):
        read_lines(InputConfig(path=str(tmp_path / "in.jsonl.gz")))


@pytest.mark.parametrize("size", [3, 12, 40, -1])
def test_damaged_gzip_is_one_sentence(tmp_path: Path, size: int) -> None:
    (tmp_path / "in.gz").write_bytes(gzip.compress(LINES)[:size])
    with pytest.raises(ConfigError, match=r"in\.gz: damaged gzip, or one that is still being written"):
        read_lines(InputConfig(path=str(tmp_path / "in.gz")))


def test_gzip_with_wrong_bytes_in_it_is_one_sentence(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(LINES * 50))
    packed[20:40] = b"\xff" * 20
    (tmp_path / "in.gz").write_bytes(packed)
    with pytest.raises(ConfigError, match="damaged gzip"):
        read_lines(InputConfig(path=str(tmp_path / "in.gz")))
