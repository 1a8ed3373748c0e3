"""What a sweep starts: launches of its points, one after the other, until each is done or has said why it is not."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from common import user_files
from common.commands.job import start as job
from common.commands.job.sweep import Outcome, SweepPlan, plan_sweep, run_sweep
from common.config import SweepLaunch, load_sweep
from common.errors import ConfigError
from common.evaluation import Board
from common.scoring import summarize

ROOT = Path(__file__).resolve().parents[3]
PAPER_TAUS = (0.95, 0.90, 0.85, 0.80, 0.75, 0.70)
GROUPS = {  # sweep, first name, profile, processes, k, of the paper's S1 to S18
    "paper_h200": [(1, "h200_tp1_bp4", 4, 3), (7, "h200_tp1_bp8", 8, 7)],
    "paper_ascend": [(13, "ascend_910c_tp4_bp4", 16, 3)],
}
SETTINGS = [
    (sweep, f"S{first + number}", profile, num_processes, k, tau)
    for sweep, groups in GROUPS.items()
    for first, profile, num_processes, k in groups
    for number, tau in enumerate(PAPER_TAUS)
]
TABLE_5 = {  # block, tau_add, tau_act, tau_conf, branches
    "GSM8K": (32, 0.1, 0.95, 0.90, 14),
    "MATH": (16, 0.1, 0.95, 0.90, 7),
    "HumanEval": (32, 0.3, 0.95, 0.95, 7),
    "MBPP": (32, 0.3, 0.95, 0.95, 7),
    "DiffuCoder HumanEval+": (32, 0.3, 0.95, 0.95, 6),
    "DiffuCoder MBPP+": (32, 0.3, 0.95, 0.90, 14),
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "NNODES", "LOPA_ONE_LAUNCH"):
        monkeypatch.delenv(name, raising=False)


def test_the_papers_settings_are_eighteen() -> None:
    names = [name for sweep in GROUPS for name in load_sweep(ROOT / f"configs/sweeps/{sweep}.yaml").names]
    assert names == [f"S{number}" for number in range(1, 19)]


@pytest.mark.parametrize(("sweep", "name", "profile", "num_processes", "k", "tau"), SETTINGS)
@pytest.mark.parametrize("run", ["-", "dream_7b_dummy"])
def test_each_setting_of_the_paper_has_its_launch(
    sweep: str, name: str, profile: str, num_processes: int, k: int, tau: float, run: str
) -> None:
    plan = plan_sweep(["-", run, sweep, "--row", name])
    (point,) = plan.sweep.points
    decode = point.run.decode
    assert (decode.num_lookahead, decode.block_size, decode.max_new_tokens) == (k, 32, 512)
    assert (decode.block_add_threshold, decode.decoded_token_threshold, decode.skip_threshold) == (0.1, tau, tau)
    assert point.profile.quantization == ("w8a8" if sweep == "paper_ascend" else None)
    assert point.run.load_format == ("auto" if run == "-" else "dummy")
    command = plan.script({}).splitlines()[-1]
    assert f" --nproc-per-node={num_processes} " in command
    assert f"/configs/profiles/{profile}.yaml" in command and command.endswith(f"/{sweep}.yaml --row {name}")
    if point.profile.engine == "lopa_ascend":
        assert decode.window_attention == "block_causal"


@pytest.mark.parametrize(("name", "expected"), TABLE_5.items())
@pytest.mark.parametrize("run", ["-", "dream_7b_dummy"])
def test_each_row_of_table_5_has_its_launch(name: str, expected: tuple[float, ...], run: str) -> None:
    plan = plan_sweep(["-", run, "paper_table5", "--row", name])
    (point,) = plan.sweep.points
    decode = point.run.decode
    thresholds = decode.block_add_threshold, decode.decoded_token_threshold, decode.skip_threshold
    assert (decode.block_size, *thresholds, decode.num_lookahead + 1) == expected
    assert plan.script({}).count(" evaluate --profile ") == 1


def test_a_dry_run_prints_a_launch_for_each_profile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRY_RUN", "true")
    assert job.main(["evaluate", "paper_h200"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("--nproc-per-node=4 ") == printed.count("--nproc-per-node=8 ") == 1
    assert "# S1, S2, S3, S4, S5, S6\n(\n" in printed and "--row S7 --row S8" in printed


def test_a_row_whose_name_has_lines_adds_none_to_the_printed_commands(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text('rows: [{name: "a\\nrm -rf x\\e[31m"}]')
    printed = plan_sweep(["cpu", "demo", str(tmp_path / "s.yaml")]).script({})
    assert printed.startswith("# a rm -rf x\\x1b[31m\n") and all(map(str.isprintable, printed.splitlines()))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["cpu", "demo", "nope"], "nope: no such file, and not one of the sweeps"),
        (["cpu", "demo"], "give PROFILE RUN SWEEP, or only SWEEP"),
        (["demo"], "row 'D2F, k = 0': it has no profile: name one on the command line, or set profile"),
        (["cpu", "-", "demo"], "row 'D2F, k = 0': it has no run"),
        (["cpu", "demo", "demo", "--retry-errors"], "evaluate: No such option: --retry-errors"),
        (["cpu", "demo", "demo", "--retries", "often"], "--retries often: give a whole number"),
        (["cpu", "demo", "demo", "--retries", "²"], "--retries ²: give a whole number"),
        (["cpu", "demo", "demo", "--retries", "9" * 5000], "--retries 9{80}: give a whole number"),
        (["paper_h200", "--row", "S19"], "no row is called 'S19': did you mean S9\\? name one of 'S1', 'S2'"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_said_before_anything_starts(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan_sweep(arguments)


def sweep_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "s.yaml"
    path.write_text(f"profile: cpu\nrun: demo\nfolder: {tmp_path / 'out'}\n{text}")
    return str(path)


THREE = "rows: [{name: a}, {name: b, decode: {num_lookahead: 1}}, {name: c, decode: {num_lookahead: 2}}]\n"


def test_points_of_other_runs_and_profiles_are_launches_of_their_own(tmp_path: Path) -> None:
    rows = """rows:
  - {name: a}
  - {name: b, set: {dtype: bfloat16}}
  - {name: c, set: {input.limit: 3}}
  - {name: d, run: demo_code}
"""
    sweep = plan_sweep([sweep_file(tmp_path, rows)]).sweep
    assert [[point.name for point in launch.points] for launch in sweep.launches] == [["a", "c"], ["b"], ["d"]]
    assert [point.run.input.limit for point in sweep.launches[0].points if point.run.input] == [None, 3]
    assert sweep.launches[1].profile.dtype == "bfloat16"


def test_what_the_command_line_sets_goes_before_the_file(tmp_path: Path) -> None:
    path = sweep_file(tmp_path, "set: {input.limit: 9, seed: 4}\nrows: [{name: a, profile: cpu_bp2, set: {seed: 5}}]")
    (point,) = plan_sweep(["cpu", "demo_code", path, "--set", "input.limit=2"]).sweep.points
    assert (point.profile.name, point.run_path.stem, point.run.seed) == ("cpu", "demo_code", 5)
    assert point.run.input is not None and point.run.input.limit == 2


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("{num_lookahead: 2}", "{eos_token_id: 99999}", "decode.eos_token_id 99999 is no token"),
        ("name: c,", "name: c, set: {input.path: nowhere.jsonl},", "nowhere.jsonl: no such input file"),
    ],
    ids=["settings", "data"],
)
def test_a_row_that_cannot_be_done_is_said_before_the_first_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], old: str, new: str,
    sentence: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(ROOT)
    path = sweep_file(tmp_path, THREE.replace(old, new))
    assert job.main(["evaluate", path]) == 2
    assert f"{path}: row 'c': {sentence}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


METRICS = summarize([])


class Worker:
    """Stands for the processes of a launch. fails: name -> what its tries end with, in turn; then it succeeds."""

    def __init__(self, plan: SweepPlan, **fails: list[Outcome]) -> None:
        self.board, self.fails = Board(plan.sweep), fails
        self.started: list[list[str]] = []

    def __call__(self, launch: SweepLaunch, names: Sequence[str]) -> Outcome:
        self.started.append([*names])
        for name in names:
            self.board.run(name)
            if self.fails.get(name):
                return self.fails[name].pop(0)
            self.board.finish(name, METRICS)
        return Outcome(0, None)


def plan_of_three(tmp_path: Path, *options: str) -> SweepPlan:
    return plan_sweep([sweep_file(tmp_path, THREE), *options])


def status(plan: SweepPlan) -> dict[str, str]:
    return {row["name"]: row["status"] for row in Board(plan.sweep).rows()}


def test_a_failed_point_does_not_keep_the_others_and_is_tried_again(tmp_path: Path) -> None:
    plan = plan_of_three(tmp_path)
    worker = Worker(plan, b=[Outcome(2, "out of memory")])
    assert run_sweep(plan, worker) == 0
    assert worker.started == [["a", "b", "c"], ["c"], ["b"]]
    assert set(status(plan).values()) == {"done"}
    assert (tmp_path / "out/sweep.csv").read_text().count("done") == 3


def test_a_point_that_fails_every_time_is_reported_and_the_exit_code_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of_three(tmp_path, "--retries", "2")
    worker = Worker(plan, b=[Outcome(2, "out of memory")] * 9)
    assert run_sweep(plan, worker) == 2
    assert worker.started == [["a", "b", "c"], ["c"], ["b"], ["b"]]
    assert "1 of 3 points failed (b: out of memory)" in capsys.readouterr().err
    assert status(plan) == {"a": "done", "b": "failed", "c": "done"}
    again = Worker(plan)  # the next start
    assert run_sweep(plan, again) == 0
    assert Board(plan.sweep).row("b")["error"] is None


def test_a_killed_launch_says_by_what_and_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_of_three(tmp_path)
    assert run_sweep(plan, Worker(plan, a=[Outcome(-signal.SIGKILL, None)])) == 0
    assert "a failed: killed by SIGKILL; the system does that when memory runs out" in caplog.text


def test_what_fails_twice_in_a_row_of_one_cause_is_not_tried_for_all(tmp_path: Path) -> None:
    plan = plan_of_three(tmp_path, "--retries", "0")
    gone = [Outcome(2, "checkpoints/x: no such folder")]
    worker = Worker(plan, a=[*gone], b=[*gone])
    assert run_sweep(plan, worker) == 2
    assert worker.started == [["a", "b", "c"], ["b", "c"]]
    assert Board(plan.sweep).row("c")["error"] == (
        "not tried, since the two before it failed: checkpoints/x: no such folder"
    )


def test_a_stop_of_the_user_is_no_failure(tmp_path: Path) -> None:
    plan = plan_of_three(tmp_path)
    worker = Worker(plan, b=[Outcome(130, None)])
    assert run_sweep(plan, worker) == 130
    assert worker.started == [["a", "b", "c"]]
    assert status(plan)["a"] == "done" and Board(plan.sweep).row("b")["failures"] == 0


def full_at_the_board(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """No room for files that hold the text."""
    write = user_files.write_whole

    def full(path: Path, content: bytes) -> None:
        if text.encode() in content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    monkeypatch.setattr(user_files, "write_whole", full)


def test_a_full_disk_ends_the_sweep_and_keeps_what_is_done(tmp_path: Path) -> None:
    plan = plan_of_three(tmp_path)
    worker = Worker(plan, b=[Outcome(2, "out/b.jsonl: No space left on device; make room, or write elsewhere")])
    with pytest.raises(ConfigError, match=r"b: .*No space left on device.*make room and start again"):
        run_sweep(plan, worker)
    assert worker.started == [["a", "b", "c"]]
    assert status(plan) == {"a": "done", "b": "failed", "c": "waiting"}
    again = Worker(plan)
    assert run_sweep(plan, again) == 0


def test_a_board_that_cannot_be_written_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of_three(tmp_path)
    worker = Worker(plan)
    full_at_the_board(monkeypatch, '"status": "done"')
    with pytest.raises(ConfigError, match=r"out/sweep\.json: No space left on device; choose a place"):
        run_sweep(plan, worker)
    monkeypatch.undo()
    assert status(plan) == {"a": "running", "b": "waiting", "c": "waiting"}
    assert run_sweep(plan, Worker(plan)) == 0


def test_rows_of_changed_settings_are_not_taken_for_the_new_ones(tmp_path: Path) -> None:
    plan = plan_of_three(tmp_path)
    assert run_sweep(plan, Worker(plan)) == 0
    changed = plan_sweep([sweep_file(tmp_path, THREE.replace("num_lookahead: 1", "num_lookahead: 5"))])
    Board(changed.sweep).begin(changed.sweep.points)
    assert [row["metrics"] is None for row in Board(changed.sweep).rows()] == [False, True, False]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rows": 3}', '{"rows": [{}, 4]}'])
def test_a_damaged_board_is_made_anew(tmp_path: Path, content: str) -> None:
    plan = plan_of_three(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/sweep.json").write_text(content)
    assert run_sweep(plan, Worker(plan)) == 0


def test_runs_that_write_to_several_folders_need_one_of_the_sweep(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("profile: cpu\nrows: [{name: a, run: demo}, {name: b, run: demo_code}]\n")
    with pytest.raises(ConfigError, match="its runs write to outputs/demo/s and outputs/demo_code/s: set folder"):
        plan_sweep([str(path)])


def test_two_sweeps_over_one_run_keep_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a folder of its own; one that was told to share another's is refused before anything is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yaml").write_text(THREE)
    (tmp_path / "second.yaml").write_text(THREE.replace("num_lookahead: 1", "num_lookahead: 5"))
    first, second = (plan_sweep(["cpu", "demo", f"{name}.yaml"]).sweep for name in ("first", "second"))
    assert (first.folder, second.folder) == (Path("outputs/demo/first"), Path("outputs/demo/second"))
    told = [["cpu", "demo", f"{name}.yaml", "--set", "output.path=mine.jsonl"] for name in ("first", "second")]
    first, second = (plan_sweep(arguments).sweep for arguments in told)
    assert first.folder == second.folder == Path("mine")
    Board(first).begin(first.points)
    before = (tmp_path / "mine/sweep.json").read_bytes()
    with pytest.raises(ConfigError, match="mine: holds results of the sweep first: choose another folder for second"):
        Board(second).begin(second.points)
    assert (tmp_path / "mine/sweep.json").read_bytes() == before
