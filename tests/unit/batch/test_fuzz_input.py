"""Whatever an input file holds: every line gets its record, or the file is refused in one line."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_files import execute, output_path, records
from fuzzing import bounded, fuzzed
from hypothesis import given
from hypothesis import strategies as st
from nonsense import damaged_bytes, damaged_tree, to_bytes, values
from scripted import ScriptedGenerator

from common.batch import check_input, metrics_path, print_summary, read_lines, require_some_finished, run_batch, source
from common.config import DeviceProfile, RunConfig
from common.errors import ConfigError

REQUESTS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "naïve 🙂"},
    {"id": 7, "question": "1 + 1?", "answer": "it is #### 2", "category": "math"},
    {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "#### 5"}], "final": 5},
    {"id": "code", "prompt": "F=MAX", "kind": "code", "entry_point": "F", "inputs": [[[1, 2]]], "expected": [2]},
    {"id": None, "text": "add", "test_list": ["x", "y"], "prompt": "-"},
]
FILE = b"".join(to_bytes(request) + b"\n" for request in REQUESTS)
ODD_LINES = (
    *(b"", b" \t\r", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xef\xbb\xbf{}", b"\x1f\x8b\x08", b"\xc2\x85", b"{", b"}"),
    *(b"null", b"[]", b"{}", b"NaN", b"[" * 100_000, b'{"":' * 100_000, b" " * 10**6 + b"1"),
    *(
        b'{"prompt": "a"',
        b'{"prompt": "a"}}',
        b'{"prompt": "a"}\r',
        b'{"prompt": "a"} {"prompt": "b"}',
        b'\x0c{"a": 1}',
    ),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "' + b"x" * 10**6 + b'"}'),
    b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"id": "a", "id": "b", "prompt": "x", "prompt": "y"}',
    *(
        b'{"prompt": "a", "id": ' + id + b"}"
        for id in (
            *(b'"line-2"', b'"7"', b"1e2", b"-0", b'"\\u0000\\u001b[2J\\u2028\\u0085"', b'"\\ud83d"', b'""'),
            *(b"9" * 4300, b"9" * 4301, b'"' + b"x" * 10**6 + b'"'),
        )
    ),
)
TEMPLATES = (
    *("Q: {question}\nA:", "{text} {test_list}", "{id}", "{nobody}", "{ {}", "{prompt}{prompt}", "\ud800 {prompt}"),
)
WRAPPERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "gzip in parts": lambda data: b"".join(gzip.compress(line, mtime=0) for line in data.splitlines(keepends=True)),
    "a begin": lambda data: b"\xef\xbb\xbf" + data,
    "carriage returns": lambda data: data.replace(b"\n", b"\r"),
    "both": lambda data: data.replace(b"\n", b"\r\n"),
    "UTF-16": lambda data: data.decode(errors="replace").encode("utf-16"),
    "UTF-32": lambda data: data.decode(errors="replace").encode("utf-32-be"),
    "a list": lambda data: b"[" + data.replace(b"\n", b",\n") + b"]\n",
    "spread": lambda data: json.dumps(data.decode(errors="replace").splitlines(), indent=1).encode(),
}
lines = damaged_tree(REQUESTS, most=6) | st.lists(values | st.sampled_from(REQUESTS), max_size=6)
settings = st.fixed_dictionaries(
    {},
    optional={
        "limit": st.integers(1, 7),
        "prompt_template": st.sampled_from(TEMPLATES) | st.text(max_size=20),
        "add_bos_token": st.booleans(),
    },
)


@pytest.fixture(autouse=True)
def without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.batch.run.fingerprint", dict)  # a process for every example


def fail_to_build() -> ScriptedGenerator:
    raise AssertionError("a model was loaded though nothing is left to do")


def whole_lines(data: bytes) -> list[bytes]:
    """Return the lines that hold something; a last one without an end, if it is JSON."""
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    *ended, last = data.split(b"\n")
    try:
        json.loads(last.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        last = b""
    return [line for line in (*ended, last) if line.strip()]


def of_all_starts(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in metrics.items() if name != "this_start"}


def run_like_the_command(profile: DeviceProfile, run: RunConfig) -> None:
    """`lopa run`, but for the model; then again, which has nothing left to do."""
    assert run.input is not None and run.output is not None
    check_input(run.input)
    metrics = execute(profile, run)
    again = run_batch(profile, run, fail_to_build)
    assert metrics is not None and again is not None
    written = json.loads(metrics_path(run.output).read_text(encoding="utf-8"))
    assert of_all_starts(metrics) == of_all_starts(again)
    assert of_all_starts(written) == json.loads(json.dumps(of_all_starts(metrics)))
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(terminal):
        print_summary("results", metrics, details=True)
        print_summary("results", metrics)
        terminal.flush()
    require_some_finished(run, metrics)


def runs_or_refuses(profile: DeviceProfile, run: RunConfig) -> bool:
    """Whether there is an output now."""
    try:
        with bounded():
            run_like_the_command(profile, run)
    except ConfigError as error:
        assert str(error).isprintable() and 0 < len(str(error)) < 2000, str(error)[:2000]
    return output_path(run).exists()


def check(profile: DeviceProfile, run: RunConfig, data: bytes, **changes: Any) -> None:
    """One record for every line, or none at all."""
    assert run.input is not None
    run = run.model_copy(update={"input": run.input.model_copy(update={"run_generated_code": True, **changes})})
    assert run.input is not None
    shutil.rmtree(output_path(run).parent, ignore_errors=True)
    if run.input.path == "-":
        source._read_whole.cache_clear()
        sys.stdin = io.TextIOWrapper(io.BytesIO(data))
    else:
        Path(run.input.path).write_bytes(data)
    if runs_or_refuses(profile, run):
        found = records(run)
        assert len(found) == len(whole_lines(data)[: run.input.limit])
        assert {str(record["id"]) for record in found} == {line.key for line in read_lines(run.input)}
        assert all(isinstance(record.get("text", record.get("error")), str) for record in found)


def test_the_whole_file_is_decoded(cpu: DeviceProfile, run: RunConfig) -> None:
    check(cpu, run, FILE)
    assert not any("error" in record for record in records(run))
    assert [record["correct"] for record in records(run) if "correct" in record] == [False, True, False]


@fuzzed
@given(trees=lines, is_ascii=st.booleans(), changes=settings)
def test_requests_of_odd_values(
    cpu: DeviceProfile, run: RunConfig, trees: Any, is_ascii: bool, changes: dict[str, Any]
) -> None:
    texts = [json.dumps(tree, ensure_ascii=is_ascii) for tree in (trees if isinstance(trees, list) else [trees])]
    check(cpu, run, "".join(f"{text}\n" for text in texts).encode(errors="surrogatepass"), **changes)


@fuzzed
@given(odd=st.lists(st.sampled_from((*ODD_LINES, *FILE.splitlines())) | st.binary(max_size=40), max_size=9), end=...)
def test_odd_lines(cpu: DeviceProfile, run: RunConfig, odd: list[bytes], end: bool) -> None:
    check(cpu, run, b"\n".join(odd) + b"\n" * end)


@fuzzed
@given(data=damaged_bytes(FILE, most=6), changes=settings)
def test_bytes(cpu: DeviceProfile, run: RunConfig, data: bytes, changes: dict[str, Any]) -> None:
    check(cpu, run, data, **changes)


@fuzzed
@given(
    names=st.lists(st.sampled_from(sorted(WRAPPERS)), min_size=1, max_size=3), is_stdin=st.booleans(), data=st.data()
)
def test_files_of_other_kinds(
    cpu: DeviceProfile,
    run: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    is_stdin: bool,
    data: st.DataObject,
) -> None:
    monkeypatch.setattr(sys, "stdin", sys.stdin)
    content = data.draw(st.just(FILE) | damaged_bytes(FILE))
    for name in names:
        content = WRAPPERS[name](content)
    content = data.draw(st.just(content) | damaged_bytes(content))
    check(cpu, run, content, **({"path": "-"} if is_stdin else {}))


@fuzzed
@given(data=damaged_bytes(FILE), size=st.integers(0, len(FILE)))
def test_a_file_that_grows(cpu: DeviceProfile, run: RunConfig, data: bytes, size: int) -> None:
    assert run.input is not None
    check(cpu, run, data[:size])
    Path(run.input.path).write_bytes(data)
    if runs_or_refuses(cpu, run):
        ids = [str(record["id"]) for record in records(run)]
        assert len(ids) == len(set(ids))
