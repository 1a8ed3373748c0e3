"""Folders that are written beside their name: whole, gone, or removed by the next run, but never while written."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quant import partial
from quant.partial import whole_or_nothing

ROOT = Path(__file__).parents[3]
WRITER = (
    "import sys, time; from pathlib import Path; from quant.partial import whole_or_nothing\n"
    "with whole_or_nothing(Path(sys.argv[1])) as folder:\n"
    "    (folder / 'a').write_text('1'); print(folder.name, flush=True); time.sleep(99)"
)


def start_writer(out: Path) -> tuple[subprocess.Popen[str], str]:
    """A process in the middle of writing `out`, and the name under which it does."""
    command = [sys.executable, "-c", WRITER, str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_whole_and_alone(tmp_path: Path) -> None:
    with whole_or_nothing(tmp_path / "deep" / "out") as folder:
        (folder / "a").write_text("1")
        assert not (tmp_path / "deep" / "out").exists()
    assert names(tmp_path / "deep") == ["out"] and names(tmp_path / "deep" / "out") == ["a"]


def test_a_place_that_takes_no_folder_is_an_error() -> None:
    with pytest.raises(OSError), whole_or_nothing(Path("/proc/q")):
        pass


def test_what_raises_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), whole_or_nothing(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_what_a_killed_run_left_goes_with_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process, left = start_writer(tmp_path / "out")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert names(tmp_path) == [left]
    with caplog.at_level(logging.INFO), whole_or_nothing(tmp_path / "out"):
        assert left not in names(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"removed {tmp_path / left}, which an interrupted run left behind"
    ]
    assert names(tmp_path) == ["out"]


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    process, name = start_writer(tmp_path / "out")
    try:
        with whole_or_nothing(tmp_path / "out"):
            assert (tmp_path / name / "a").read_text() == "1"
        assert names(tmp_path) == sorted([name, "out"])
    finally:
        process.kill()
        process.communicate()


def test_only_folders_of_this_name_are_removed(tmp_path: Path) -> None:
    mine = [".o[u]t.partial-7", ".o[u]t.partial-8-1"]
    others = [".out.partial-7", ".o[u]t.partial-x", ".o[u]t.partial-1.partial-2", "o[u]t.partial-7"]
    for name in [*mine, *others, "kept"]:
        (tmp_path / name).mkdir()
    (tmp_path / ".o[u]t.partial-9").symlink_to(tmp_path / "kept")
    (tmp_path / ".o[u]t.partial-10").write_text("a file")
    with whole_or_nothing(tmp_path / "o[u]t"):
        pass
    assert names(tmp_path) == sorted([*others, "kept", "o[u]t", ".o[u]t.partial-9", ".o[u]t.partial-10"])
    assert names(tmp_path / "kept") == []


def test_a_folder_that_is_taken_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = fcntl.flock, []

    def flock(lock: int, operation: int) -> None:
        if not taken:  # another run has locked and removed it in between
            taken.append(path := next(tmp_path.iterdir()))
            (path / ".lock").unlink()
            path.rmdir()
        real(lock, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with whole_or_nothing(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
        assert folder != taken[0]
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["a"]


def test_without_locks_folders_are_written_and_none_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(lock: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(partial.fcntl, "flock", flock)
    (tmp_path / ".out.partial-7").mkdir()
    with whole_or_nothing(tmp_path / "out"):
        pass
    assert names(tmp_path) == [".out.partial-7", "out"]


def test_another_machines_process_of_the_same_number_is_no_obstacle(tmp_path: Path) -> None:
    taken = tmp_path / f".out.partial-{os.getpid()}"
    taken.mkdir()
    lock = os.open(taken / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with whole_or_nothing(tmp_path / "out") as folder:
        assert folder.name == f".out.partial-{os.getpid()}-1"
    assert names(tmp_path) == [taken.name, "out"]
    os.close(lock)
