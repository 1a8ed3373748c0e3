"""A sweep over a scripted model: what becomes of points that fail, are stopped, or find no room on the disk."""

from __future__ import annotations

import csv
import errno
import json
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedGenerator

from common.config import DecodeConfig, DeviceProfile, OutputConfig, RunConfig, Sweep
from common.decoding import Completion, GenerationRequest, Rejection
from common.errors import ConfigError, EngineError
from common.evaluation import Board, evaluate_sweep
from common.evaluation.families.trace import is_family_trace
from common.processes import Stopped
from tests.unit.batch.batch_files import output_path, sweep_of, write_input

SETTINGS = {f"k = {k}": DecodeConfig(num_lookahead=k) for k in (0, 1, 7)}


@pytest.fixture
def sweep(cpu: DeviceProfile, run: RunConfig) -> Sweep:
    write_input(run, [{"id": name, "question": "#### 4", "final": 4} for name in "abc"])
    return sweep_of(cpu, run, SETTINGS)


class Failing(ScriptedGenerator):
    """Under one setting it fails once it has finished a request."""

    error: BaseException = EngineError("step 7: out of memory")

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Completion | Rejection]:
        for number, result in enumerate(super().generate(requests)):
            if number == 1 and self.run.decode.num_lookahead == 1:
                raise self.error
            yield result

    def with_decode(self, decode: DecodeConfig) -> ScriptedGenerator:
        changed = type(self)(self.profile, self.run.model_copy(update={"decode": decode}))
        changed.error = self.error
        return changed


def decode_all(sweep: Sweep, kind: type[ScriptedGenerator] = ScriptedGenerator) -> list[dict[str, Any]]:
    point = sweep.points[0]
    return evaluate_sweep(sweep, lambda: kind(point.profile, point.run))


def status(sweep: Sweep) -> list[str]:
    return [row["status"] for row in Board(sweep).rows()]


def num_lines(sweep: Sweep) -> list[int]:
    paths = [output_path(point.run) for point in sweep.points]
    return [path.read_text().count("\n") if path.exists() else 0 for path in paths]


def test_a_folder_holds_records_metrics_and_where_they_come_from_for_each_point(sweep: Sweep) -> None:
    decode_all(sweep)
    for point in sweep.points:
        metrics = json.loads(output_path(point.run).with_suffix(".metrics.json").read_text())
        assert metrics["environment"]["torch"] and metrics["environment"]["profile"] == "test"
        assert metrics["run"]["decode"]["num_lookahead"] == point.run.decode.num_lookahead
    with (sweep.folder / "sweep.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["name"], row["status"], row["num_lookahead"]) for row in rows] == [
        ("k = 0", "done", "0"), ("k = 1", "done", "1"), ("k = 7", "done", "7"),
    ]  # fmt: skip
    assert all(float(row["tpf_effective"]) > 0 and row["commit"] and row["records"] for row in rows)
    assert float(rows[2]["tpf_effective"]) > float(rows[0]["tpf_effective"])


@pytest.mark.parametrize(("lookaheads", "has_area"), [([0], False), ([0, 0], False), ([0, 7], True)])
def test_an_area_is_only_printed_of_points_that_span_one(
    sweep: Sweep, lookaheads: list[int], has_area: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    point = sweep.points[0]
    settings = {f"point {number}": DecodeConfig(num_lookahead=k) for number, k in enumerate(lookaheads)}
    chosen = sweep_of(point.profile, point.run, settings)
    decode_all(chosen)
    printed = capsys.readouterr().out
    assert "written to" in printed and ("AUP" in printed) is has_area
    area = json.loads((chosen.folder / "sweep.json").read_text())["area_under_accuracy"]
    assert (area is not None) is has_area


def test_a_point_that_fails_is_on_the_board_and_the_next_start_tries_it_again(sweep: Sweep) -> None:
    with pytest.raises(EngineError, match="out of memory"):
        decode_all(sweep, Failing)
    assert status(sweep) == ["done", "failed", "waiting"]
    assert Board(sweep).row("k = 1")["error"] == "step 7: out of memory"
    assert num_lines(sweep) == [3, 1, 0]
    rows = decode_all(sweep)
    assert [row["status"] for row in rows] == ["done"] * 3 and num_lines(sweep) == [3, 3, 3]
    assert [row["metrics"]["requests"]["finished"] for row in rows] == [3, 3, 3]


def test_a_point_whose_requests_were_all_refused_has_failed_and_is_tried_anew(
    cpu: DeviceProfile, run: RunConfig
) -> None:
    write_input(run, [{"prompt": "x" * 300}])
    sweep = sweep_of(cpu, run, {"only": DecodeConfig()})
    for failures in (1, 2):
        with pytest.raises(ValueError, match="none of 1 requests could be decoded"):
            decode_all(sweep)
        assert Board(sweep).row("only")["failures"] == failures
    assert num_lines(sweep) == [1]


def test_what_cannot_be_written_is_known_before_the_first_point(cpu: DeviceProfile, run: RunConfig) -> None:
    write_input(run, [{"id": "a", "question": "#### 4"}])
    for name, sentence in (("a\0b", "is no name of a file"), ("x" * 300, "File name too long; choose ")):
        output = OutputConfig(path=str(output_path(run).with_name(f"{name}.jsonl")))
        with pytest.raises(ConfigError, match=sentence):
            decode_all(sweep_of(cpu, run.model_copy(update={"output": output}), SETTINGS))
    sweep = sweep_of(cpu, run, SETTINGS)
    output_path(sweep.points[-1].run).mkdir(parents=True)
    with pytest.raises(ConfigError, match="is a folder: name a file in it"):
        decode_all(sweep)
    assert not Board(sweep).rows() and [*sweep.folder.iterdir()] == [output_path(sweep.points[-1].run)]


def test_a_stopped_point_waits(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "error", Stopped(signal.SIGTERM))
    with pytest.raises(Stopped):
        decode_all(sweep, Failing)
    assert status(sweep) == ["done", "waiting", "waiting"]
    assert not Board(sweep).has_failed_before("k = 1")


def test_a_disk_that_fills_up_names_the_file_and_nothing_is_lost(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    write, replace = os.write, Path.replace
    num_written = 0

    def full() -> OSError:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails_from_the_fifth(descriptor: int, data: bytes) -> int:
        nonlocal num_written
        num_written += 1
        if num_written > 4:
            raise full()
        return write(descriptor, data)

    def fails_too(path: Path, target: Path) -> Path:
        if num_written > 4:
            raise full()
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fails_from_the_fifth)
        patched.setattr(Path, "replace", fails_too)
        with pytest.raises(OSError, match=r"No space left on device: .*k-1\.jsonl"):
            decode_all(sweep)
    assert status(sweep) == ["done", "running", "waiting"] and num_lines(sweep) == [3, 1, 0]
    assert [row["status"] for row in decode_all(sweep)] == ["done"] * 3
    assert num_lines(sweep) == [3, 3, 3]


def test_a_start_that_finds_all_done_keeps_what_the_first_one_measured(sweep: Sweep) -> None:
    first = decode_all(sweep)
    again = decode_all(sweep)
    assert again == first


DEEP = "[" * 100_000  # nested deeper than Python's parser goes


def test_a_board_that_is_nested_too_deep_is_made_anew(sweep: Sweep) -> None:
    sweep.folder.mkdir(parents=True)
    Board(sweep).path.write_text(DEEP)
    assert [row["status"] for row in decode_all(sweep)] == ["done"] * 3


@pytest.mark.parametrize("name", ["sweep.csv", "sweep.md"])
def test_tables_of_a_sweep_replace_no_other_file(sweep: Sweep, name: str) -> None:
    decode_all(sweep)
    Board(sweep).path.unlink()
    decode_all(sweep)  # over its own
    (sweep.folder / name).write_text("# notes\n")
    with pytest.raises(ConfigError, match=f"{name}: the file is there, and no earlier result of this command"):
        decode_all(sweep)
    assert (sweep.folder / name).read_text() == "# notes\n"


def test_a_trace_that_is_nested_too_deep_is_of_no_family(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(DEEP)
    assert not is_family_trace(tmp_path / "trace.json")
