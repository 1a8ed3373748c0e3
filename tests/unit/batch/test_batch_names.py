"""One writer, whatever the name: links, names that differ in little, file systems without locks or room."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_files import RUN, execute, output_path, records, write_input
from started import python

from common.batch import metrics_path, read_records
from common.batch.files import input_and_output, sidecar_path, write_whole
from common.batch.output import join_output, start_output
from common.config import DeviceProfile, OutputConfig, RunConfig
from common.errors import ConfigError


def renamed(run: RunConfig, path: Path | str, metrics: Path | None = None) -> RunConfig:
    output = OutputConfig(path=str(path), metrics_path=None if metrics is None else str(metrics))
    return run.model_copy(update={"output": output})


def two_lines(run: RunConfig) -> None:
    write_input(run, [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"}])


# Links


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_and_its_target_are_one_output_with_one_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    monkeypatch.setattr("common.batch.sidecar.LOCK_WAIT_S", 0.3)
    target, link, second = tmp_path / "b.jsonl", tmp_path / "link.jsonl", tmp_path / "second.jsonl"
    if exists:
        target.touch()
    link.symlink_to(target)
    second.symlink_to(link)
    output = start_output(target, RUN, overwrite=False, retry_errors=False)
    for name in (link, second):
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match="another run is writing to it"):
                start_output(name, RUN, overwrite=overwrite, retry_errors=False)
    output.close()
    start_output(second, RUN, overwrite=False, retry_errors=False).close()
    assert [path.name for path in tmp_path.glob("*.run.json")] == ["b.jsonl.run.json"]


def test_a_run_through_a_link_resumes_what_was_done_through_the_file(cpu: DeviceProfile, run: RunConfig) -> None:
    two_lines(run)
    execute(cpu, run)
    link = output_path(run).with_name("link.jsonl")
    link.symlink_to("o.jsonl")
    metrics = execute(cpu, renamed(run, link))
    assert metrics is not None and metrics["requests"]["finished"] == 2
    assert [record["id"] for record in records(run)] == ["a", "b"]
    assert sorted(path.name for path in link.parent.glob("*.metrics.json")) == ["o.metrics.json"]


def test_errors_tried_again_through_a_link_stay_in_the_file_and_its_mode(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y" * 300}])
    output_path(run).parent.mkdir()
    link = output_path(run).with_name("link.jsonl")
    link.symlink_to("o.jsonl")
    execute(cpu, renamed(run, link))
    output_path(run).chmod(0o600)
    execute(cpu, renamed(run, link), retry_errors=True)
    assert link.is_symlink() and not output_path(run).is_symlink()
    assert [record["id"] for record in records(run)] == ["a", "b"]
    assert stat.S_IMODE(output_path(run).stat().st_mode) == 0o600


def test_metrics_are_written_where_a_link_leads(cpu: DeviceProfile, run: RunConfig, tmp_path: Path) -> None:
    two_lines(run)
    link, target = tmp_path / "metrics", tmp_path / "elsewhere.json"
    link.symlink_to(target)
    execute(cpu, renamed(run, output_path(run), link))
    assert link.is_symlink() and json.loads(target.read_text())["requests"]["finished"] == 2


def test_an_output_that_was_started_through_a_link_by_an_earlier_version_is_resumed(
    cpu: DeviceProfile, run: RunConfig
) -> None:
    two_lines(run)
    execute(cpu, run)
    link = output_path(run).with_name("link.jsonl")
    link.symlink_to("o.jsonl")
    sidecar_path(output_path(run)).rename(link.with_name("link.jsonl.run.json"))
    metrics = execute(cpu, renamed(run, link))
    assert metrics is not None and metrics["requests"]["finished"] == 2
    execute(cpu, run)  # from now on it belongs to the file
    assert not link.with_name("link.jsonl.run.json").exists()


def test_an_output_with_a_hard_link_is_refused_as_it_would_have_two_locks(cpu: DeviceProfile, run: RunConfig) -> None:
    two_lines(run)
    execute(cpu, run)
    other = output_path(run).with_name("other.jsonl")
    other.hardlink_to(output_path(run))
    for name in (output_path(run), other):
        with pytest.raises(ConfigError, match="has a second name"):
            execute(cpu, renamed(run, name), overwrite=True)
    assert len(records(run)) == 2


@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_link_that_leads_back_to_itself_is_one_sentence(cpu: DeviceProfile, run: RunConfig, kind: str) -> None:
    two_lines(run)
    assert run.input is not None
    loop = Path(run.input.path).with_name("loop.jsonl")
    loop.symlink_to(loop)
    changed = renamed(run, loop)
    if kind == "input":
        changed = run.model_copy(update={"input": run.input.model_copy(update={"path": str(loop)})})
    with pytest.raises(ConfigError, match=r"loop\.jsonl"):
        execute(cpu, changed)


# Metrics


def test_no_two_outputs_of_one_stem_share_their_metrics(cpu: DeviceProfile, run: RunConfig, tmp_path: Path) -> None:
    two_lines(run)
    names = ("res.k0", "res.k7", "res.jsonl", "res.json", "res.jsonl.old")
    for name in names:
        execute(cpu, renamed(run, tmp_path / name))
    found = {metrics_path(OutputConfig(path=str(tmp_path / name))).name for name in names}
    assert found == {f"res{suffix}.metrics.json" for suffix in ("", ".k0", ".k7", ".json", ".jsonl.old")}
    assert all((tmp_path / name).is_file() for name in found)


@pytest.mark.parametrize("explicit", [True, False])
def test_metrics_of_another_output_are_not_replaced(
    cpu: DeviceProfile, run: RunConfig, tmp_path: Path, explicit: bool
) -> None:
    two_lines(run)
    shared = tmp_path / "shared.json" if explicit else None
    first, second = renamed(run, tmp_path / "a", shared), renamed(run, tmp_path / "a.jsonl", shared)
    execute(cpu, first)
    before = metrics_path(first.output).read_bytes()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"holds the metrics of .*/a: set output.metrics_path to a file of its own"):
        execute(cpu, second, overwrite=True)
    assert metrics_path(first.output).read_bytes() == before  # type: ignore[arg-type]
    execute(cpu, first, overwrite=True)
    (tmp_path / "a").unlink()
    execute(cpu, second, overwrite=True)  # whose they were is gone


def test_a_copied_folder_of_results_is_resumed_where_it_is(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    two_lines(run)
    execute(cpu, run)
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in output_path(run).parent.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    metrics = execute(cpu, renamed(run, copied / "o.jsonl"))
    assert metrics is not None and metrics["requests"]["finished"] == 2


def test_metrics_never_go_over_another_runs_output(cpu: DeviceProfile, run: RunConfig, tmp_path: Path) -> None:
    two_lines(run)
    execute(cpu, run)
    before = output_path(run).read_bytes()
    with pytest.raises(ConfigError, match="is the output of another run"):
        execute(cpu, renamed(run, tmp_path / "new.jsonl", output_path(run)))
    assert output_path(run).read_bytes() == before


@pytest.mark.parametrize("chosen", [None, "notes.json"])
def test_metrics_go_over_earlier_metrics_alone(
    cpu: DeviceProfile, run: RunConfig, tmp_path: Path, chosen: str | None
) -> None:
    two_lines(run)
    named = renamed(run, tmp_path / "new.jsonl", chosen and tmp_path / chosen)  # type: ignore[arg-type]
    metrics = metrics_path(named.output)  # type: ignore[arg-type]
    metrics.write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match=r"output\.metrics_path .*the file is there, and no earlier result"):
        execute(cpu, named)
    assert metrics.read_text() == '{"mine": 1}' and not (tmp_path / "new.jsonl").exists()


def test_a_device_is_no_place_for_metrics(cpu: DeviceProfile, run: RunConfig) -> None:
    two_lines(run)
    with pytest.raises(ConfigError, match=r"output\.metrics_path is no regular file"):
        execute(cpu, renamed(run, output_path(run), Path("/dev/null")))
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("name", ["o.jsonl.run.json", "o.metrics.json", "o.jsonl", "link.jsonl.run.json"])
def test_a_pipe_is_no_place_for_a_file_of_a_run(name: str, cpu: DeviceProfile, run: RunConfig, tmp_path: Path) -> None:
    """Opening one would wait for its other end."""
    two_lines(run)
    (tmp_path / "link.jsonl").symlink_to(output_path(run))
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=r"no regular file.*; (remove it|name a file)"):
        execute(cpu, renamed(run, tmp_path / ("link.jsonl" if name.startswith("link") else "o.jsonl")))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("answers", [None, "", "my own notes\n"])
@pytest.mark.parametrize("mine", ['{"my": "notes"}', "notes", "[" * 100_000])
def test_a_file_that_is_no_runs_is_not_written_over_beside_an_output(
    cpu: DeviceProfile, run: RunConfig, mine: str, answers: str | None, overwrite: bool
) -> None:
    two_lines(run)
    sidecar = sidecar_path(output_path(run))
    sidecar.parent.mkdir()
    sidecar.write_text(mine)
    if answers is not None:
        output_path(run).write_text(answers)
    with pytest.raises(ConfigError, match=r"choose another output\.path") as refused:
        execute(cpu, run, overwrite=overwrite)
    assert sidecar.read_text() == mine and len(str(refused.value)) < 500
    assert not output_path(run).exists() or output_path(run).read_text() == answers


def test_a_file_that_is_no_runs_stays_beside_a_link(cpu: DeviceProfile, run: RunConfig, tmp_path: Path) -> None:
    two_lines(run)
    (tmp_path / "link.jsonl").symlink_to(output_path(run))
    mine = tmp_path / "link.jsonl.run.json"
    mine.write_text("notes")
    execute(cpu, renamed(run, tmp_path / "link.jsonl"))
    assert mine.read_text() == "notes" and len(records(run)) == 2


def test_what_a_kill_left_of_a_runs_own_file_is_written_again(cpu: DeviceProfile, run: RunConfig) -> None:
    two_lines(run)
    sidecar = sidecar_path(output_path(run))
    sidecar.parent.mkdir()
    for begin in ("", '{\n  "mo', '{\n  "model": "m",\n  "model.re'):
        sidecar.write_text(begin)
        execute(cpu, run)
        output_path(run).unlink()


def test_a_table_replaces_a_pipe_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "sweep.md")
    write_whole(tmp_path / "sweep.md", "a")
    assert (tmp_path / "sweep.md").read_text() == "a"


# Ids that are there twice


def test_records_that_are_there_twice_count_once_with_one_warning(
    cpu: DeviceProfile, run: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    two_lines(run)
    execute(cpu, run)
    output_path(run).write_bytes(2 * output_path(run).read_bytes())
    caplog.clear()
    metrics = execute(cpu, run)
    assert metrics is not None and metrics["requests"]["finished"] == 2
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "2 records have the id of an earlier one" in warnings[0]
    assert [record["id"] for record in read_records(output_path(run))] == ["a", "b"]


def test_trying_errors_again_keeps_the_answer_of_an_id_that_is_there_twice(cpu: DeviceProfile, run: RunConfig) -> None:
    two_lines(run)
    execute(cpu, run)
    answers = output_path(run).read_bytes()
    output_path(run).write_bytes(b'{"id": "a", "error": "no"}\n' + answers + answers)
    execute(cpu, run, retry_errors=True)
    assert output_path(run).read_bytes() == answers


# File systems without locks, room or permission


def failing(error: int, calls: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    for name in calls:
        module = fcntl if name == "flock" else os
        monkeypatch.setattr(module, name, fail)


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_a_run_works_and_warns_once(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    two_lines(run)
    failing(error, ("flock",), monkeypatch)
    metrics = execute(cpu, run)
    assert metrics is not None and metrics["requests"]["finished"] == 2
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "has no locks; do not start this run twice at a time" in warnings[0]
    execute(cpu, run, overwrite=True)
    execute(cpu, run, retry_errors=True)
    join_output(output_path(run)).close()


def test_a_lock_that_fails_for_another_reason_is_no_file_system_without_locks(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_lines(run)
    failing(errno.EIO, ("flock",), monkeypatch)
    with pytest.raises(ConfigError, match=r"o\.jsonl: Input/output error"):
        execute(cpu, run)


def test_without_locks_a_line_that_another_process_is_writing_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(errno.ENOLCK, ("flock",), monkeypatch)
    path = tmp_path / "o.jsonl"
    output = start_output(path, RUN, overwrite=False, retry_errors=False)
    path.write_bytes(b'{"id": 1, "te')
    output.append({"id": 2})
    assert path.read_bytes() == b'{"id": 1, "te{"id": 2}\n'


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "fsync"])
def test_a_full_disk_at_the_start_names_the_file(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    two_lines(run)
    with monkeypatch.context() as patched:
        failing(errno.ENOSPC, (call,), patched)
        with pytest.raises(ConfigError, match=r"o\.jsonl: No space left on device; choose a place that is writable"):
            execute(cpu, run)
    execute(cpu, run)  # with room again, nothing is in the way
    assert len(records(run)) == 2


def test_a_sidecar_that_is_not_written_whole_is_an_error_at_once(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_lines(run)
    monkeypatch.setattr(os, "pwrite", lambda *_: 3)
    with pytest.raises(ConfigError, match="No space left on device"):
        execute(cpu, run)


def test_a_disk_that_is_full_later_names_the_file_and_keeps_what_is_there(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_lines(run)
    write = os.write
    written: list[bytes] = []

    def fails_at_the_second(descriptor: int, data: bytes) -> int:
        written.append(data)
        if len(written) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", fails_at_the_second)
    with pytest.raises(OSError, match=r"No space left on device: .*o\.jsonl"):
        execute(cpu, run)
    assert [record["id"] for record in records(run)] == ["a"]


def test_a_disk_that_is_full_at_the_end_names_the_file_and_lets_the_lock_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = start_output(tmp_path / "o.jsonl", RUN, overwrite=False, retry_errors=False)
    with monkeypatch.context() as patched:
        failing(errno.EDQUOT, ("fsync",), patched)
        with pytest.raises(OSError, match=r"Disk quota exceeded: .*o\.jsonl"):
            output.close()
    monkeypatch.setattr("common.batch.sidecar.LOCK_WAIT_S", 0)
    start_output(tmp_path / "o.jsonl", RUN, overwrite=False, retry_errors=False).close()


def test_metrics_that_cannot_be_written_name_the_file_and_leave_nothing_half(
    cpu: DeviceProfile, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_lines(run)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match=r"o\.metrics\.json: No space left on device"):
        execute(cpu, run)
    assert sorted(path.name for path in output_path(run).parent.iterdir()) == ["o.jsonl", "o.jsonl.run.json"]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (lambda folder: f"{folder}/{'x' * 300}.jsonl", r"x\.jsonl: File name too long; choose another"),
        (lambda folder: f"{folder}/{'x' * 248}", "File name too long; choose another output.path"),
        (lambda folder: "/proc/x", "/proc/x: No such file or directory"),
        (lambda folder: "/proc/x/y.jsonl", "/proc/x/y.jsonl: No such file or directory"),
        (lambda folder: f"{folder}/a\0b", "is no name of a file"),
        (lambda folder: "-", "results go to a file"),
        (lambda folder: ".", "is a folder"),
    ],
)
def test_a_name_that_no_file_can_have_is_one_sentence_with_the_name(
    cpu: DeviceProfile, run: RunConfig, tmp_path: Path, output: Callable[[Path], str], expected: str
) -> None:
    two_lines(run)
    with pytest.raises(ConfigError, match=expected):
        execute(cpu, renamed(run, output(tmp_path)))


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "x" * 300, ""])
def test_an_input_that_no_file_can_be_is_one_sentence(cpu: DeviceProfile, run: RunConfig, path: str) -> None:
    assert run.input is not None
    with pytest.raises(ConfigError):
        execute(cpu, run.model_copy(update={"input": run.input.model_copy(update={"path": path})}))


def test_an_output_may_not_be_what_standard_input_reads(tmp_path: Path, run: RunConfig) -> None:
    (tmp_path / "both.jsonl").write_text('{"prompt": "a"}\n')
    program = (
        "from common.batch import input_and_output\n"
        "from common.config import InputConfig, OutputConfig, RunConfig\n"
        "input_and_output(RunConfig(model='m', input=InputConfig(path='-'), output=OutputConfig(path='both.jsonl')))\n"
    )
    with (tmp_path / "both.jsonl").open("rb") as stream:
        found = python("-c", program, cwd=tmp_path, stdin=stream)
    assert "must be different files" in found.stderr


def test_files_in_order_are_taken_as_they_are(run: RunConfig) -> None:
    two_lines(run)
    assert input_and_output(run) == (run.input, run.output)
