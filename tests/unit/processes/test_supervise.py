"""Tests whose message is shown when a process fails."""

from __future__ import annotations

import resource
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from started import python

from common.errors import LOST_PEER
from common.processes.supervise import read_error_file, root_cause, write_error_file

ROOT = Path(__file__).parents[3]


@dataclass
class Failure:
    """What torchrun knows of a failed worker."""

    exitcode: int
    error_file_data: dict[str, Any] = field(default_factory=dict)
    timestamp: int = 100
    pid: int = 4242

    def signal_name(self) -> str:
        return signal.Signals(-self.exitcode).name


def told(sentence: str, at: float) -> dict[str, Any]:
    return {"message": {"message": sentence, "extraInfo": {"timestamp": str(int(at)), "time": at}}}


def test_the_first_failure_is_shown_not_those_it_took_along() -> None:
    failures = {
        0: Failure(143),
        1: Failure(2, told("a peer is gone", 100.9)),
        2: Failure(2, told("out of memory", 100.2)),
        3: Failure(-signal.SIGTERM),
    }
    assert root_cause(failures) == ("rank 2 failed: out of memory", 2)


def test_a_killed_rank_is_the_cause_of_what_its_peers_report() -> None:
    failures = {0: Failure(2, told("a peer is gone", 99.0)), 1: Failure(-signal.SIGKILL)}
    sentence, exit_code = root_cause(failures)
    assert sentence.startswith("rank 1 (pid 4242) was killed by SIGKILL")
    assert exit_code == 137


def test_a_rank_that_aborts_when_its_peer_is_killed_is_not_the_cause() -> None:
    """torch's own threads abort a process whose peers are gone, before the agent has noticed either."""
    failures = {0: Failure(-signal.SIGABRT), 1: Failure(-signal.SIGKILL), 2: Failure(2, told("a peer is gone", 99.0))}
    assert root_cause(failures)[0].startswith("rank 1 (pid 4242) was killed by SIGKILL")
    del failures[1]
    sentence, exit_code = root_cause(failures)
    assert sentence.startswith("rank 0 (pid 4242) was killed by SIGABRT") and exit_code == 134
    assert LOST_PEER in sentence  # so that its node repeats what another one tells


def test_a_stopped_rank_that_had_to_be_killed_is_not_the_cause() -> None:
    failures = {0: Failure(2, told("the device has not answered", 99.0)), 1: Failure(-signal.SIGKILL, timestamp=129)}
    assert root_cause(failures) == ("rank 0 failed: the device has not answered", 2)


def test_of_ranks_that_were_all_ended_the_first_is_the_cause() -> None:
    failures = {0: Failure(-signal.SIGTERM, timestamp=101), 1: Failure(143, told("stopped by SIGTERM", 99.0))}
    assert root_cause(failures) == ("rank 1 failed: stopped by SIGTERM", 143)


def test_a_defect_points_to_its_own_traceback() -> None:
    assert root_cause({5: Failure(1)}) == ("rank 5 failed with exit code 1; its own output is above", 1)


def test_last_words_that_are_nested_too_deep_are_none(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text("[" * 100_000)
    assert read_error_file(tmp_path / "error.json") is None


def test_last_words_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_error_file("out of memory")
    assert read_error_file(path) == "out of memory"
    path.unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))  # as a disk without room
    try:
        write_error_file("the disk is full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir()), "torchrun would fail on half a file"


@pytest.mark.slow
@pytest.mark.parametrize("exit_code", [0, 3])
def test_a_launcher_leaves_no_temporary_files(exit_code: int, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(f"raise SystemExit({exit_code})")
    (tmp_path / "tmp").mkdir()
    program = (
        "import sys; from common.processes import Nodes, supervise, torchrun_options; "
        "sys.exit(supervise([*torchrun_options(Nodes(), 2), 'worker.py']))"
    )
    run = python("-c", program, cwd=tmp_path, env={"TMPDIR": str(tmp_path / "tmp")}, timeout=240)
    assert run.returncode == exit_code, run.stderr
    assert not list((tmp_path / "tmp").glob("*torch*")) + list((tmp_path / "tmp").glob("lopa*"))
