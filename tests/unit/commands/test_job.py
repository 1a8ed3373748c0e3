"""What a profile and a run start, on one node or several."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from started import lopa, python

from common.commands.job import plan_job
from common.commands.job import start as job
from common.commands.job.launch import job_of
from common.config import DeviceProfile
from common.errors import ConfigError, as_shell
from common.processes import Nodes, check_threads, processes_here

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "NNODES", "NODE_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def profile_of(**changes: Any) -> DeviceProfile:
    return DeviceProfile.model_validate({"name": "p", "engine": "lopa_cuda", "device": "cpu", **changes})


MESH_8 = {"data_parallel_size": 2, "branch_parallel_size": 2, "tensor_parallel_size": 2}


def planned(*arguments: str, **environment: str) -> list[str]:
    return plan_job(["run", *arguments], environment)[0].script().splitlines()


def test_one_process_is_started_directly() -> None:
    *exports, command = planned("cpu", "demo", "--set", "decode.num_lookahead=1", "--overwrite")
    assert [export.partition("=")[0] for export in exports] == ["export OMP_NUM_THREADS"]
    assert command == (
        f"{sys.executable} -m common.commands run --profile {ROOT}/configs/profiles/cpu.yaml "
        f"{ROOT}/configs/runs/demo.yaml --overwrite --set decode.num_lookahead=1"
    )


@pytest.mark.parametrize("number", ["abc", "", "0", "-1", "2,"])
@pytest.mark.parametrize("start", [lambda given: planned("cpu", "demo", **given), check_threads])
def test_a_number_of_threads_that_is_none_is_refused(start: Callable[..., object], number: str) -> None:
    start({"OMP_NUM_THREADS": "2,1"})
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS is '{number}': set it to a number of threads"):
        start({"OMP_NUM_THREADS": number})


def test_allowing_programs_is_a_setting_of_the_run() -> None:
    job, _, run = plan_job(["run", "cpu", "demo", "--allow-code-execution"], {})
    assert job.script().endswith(" --set input.run_generated_code=true")
    assert run.input is not None and run.input.run_generated_code


def test_several_processes_are_started_by_torchrun_with_the_profiles_environment() -> None:
    *exports, command = planned("h200_tp1_bp8", "gsm8k")
    assert "export NCCL_NVLS_ENABLE=0" in exports
    assert " -m torch.distributed.run --standalone " in command
    assert " --nproc-per-node=8 --max-restarts=0 " in command
    assert "/configs/runs/gsm8k.yaml" in command


def test_the_users_environment_goes_before_the_profiles() -> None:
    exports = planned("h200_tp1_bp8", "gsm8k", NCCL_NVLS_ENABLE="1", OMP_NUM_THREADS="3")
    assert not [line for line in exports if line.startswith(("export NCCL_NVLS", "export OMP"))]


def test_the_profile_may_say_how_many_threads_a_process_has() -> None:
    assert "export OMP_NUM_THREADS=3" in planned("cpu", "demo", "--set", "environment.OMP_NUM_THREADS=3")


def test_several_nodes_share_the_processes() -> None:
    command = planned("h200_tp1_bp8", "gsm8k", NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1", MASTER_PORT="1234")[
        -1
    ]
    wanted = "--nnodes=2 --node-rank=1 --master-addr=10.0.0.1 --master-port=1234 --nproc-per-node=4"
    assert wanted in command


ASCEND_JOB = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0,1,2,3", "RANK": "1",
              "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2222"}  # fmt: skip
PYTORCH_JOB = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2222", "GROUP_RANK": "1"}
TRAINER = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "10.0.0.1",
           "PET_MASTER_PORT": "2222"}  # fmt: skip


@pytest.mark.parametrize("pod", [ASCEND_JOB, PYTORCH_JOB, TRAINER], ids=["AscendJob", "PyTorchJob", "trainer"])
def test_pods_are_nodes(pod: dict[str, str]) -> None:
    dropped, *_, command = planned("h200_tp1_bp8", "gsm8k", **pod)
    assert "--nnodes=2 --node-rank=1 --master-addr=10.0.0.1 --master-port=2222 --nproc-per-node=4" in command
    assert dropped.split() == ["unset", *sorted(pod.keys() - {"MASTER_ADDR", "MASTER_PORT"})]


def test_one_pod_is_one_node() -> None:
    dropped, *_, command = planned("cpu", "demo", **{**ASCEND_JOB, "WORLD_SIZE": "4", "RANK": "0"})
    assert dropped == "unset LOCAL_RANK LOCAL_WORLD_SIZE RANK WORLD_SIZE" and "torch.distributed" not in command


def test_what_is_said_goes_before_what_a_pod_says() -> None:
    command = planned("h200_tp1_bp8", "gsm8k", **{**ASCEND_JOB, "NNODES": "1"})[-1]
    assert " --standalone " in command and " --nproc-per-node=8 " in command


def test_a_process_in_a_pod_does_not_take_itself_for_a_rank() -> None:
    done = lopa("run", "demo", "--profile", "h200_tp1_bp8", "hello", env=ASCEND_JOB, timeout=120)
    assert (done.returncode, " but 1 was started: " in done.stderr) == (2, True), done.stderr


def test_what_is_started_in_a_pod_has_no_variables_of_the_pod() -> None:
    code = (
        "from common.commands.job.launch import Job, start_here\n"
        "start_here(Job({}, ['-c', 'import os; print(*os.environ)'], False, dropped=('RANK', 'LOCAL_RANK')))\n"
    )
    started = python("-c", code, env=ASCEND_JOB)
    names = set(started.stdout.split())
    assert "MASTER_ADDR" in names and not names & {"RANK", "LOCAL_RANK"}, started.stderr


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({**ASCEND_JOB, "LOCAL_WORLD_SIZE": "3"}, "WORLD_SIZE 8 of this pod is no multiple of its LOCAL_WORLD_SIZE 3"),
        ({"PET_NNODES": "1:3"}, "PET_NNODES is '1:3': set it to a number"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "NNODES is 2 but NODE_RANK is not set"),
        ({"NNODES": "two"}, "NNODES is 'two': set it to a number"),
        ({"NNODES": "²"}, "NNODES is '²': set it to a number"),
        ({"NNODES": "9" * 5000}, "NNODES is '9{80}': set it to a number"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NNODES is 2 but NODE_RANK is not set"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES is 2 but MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2", "RANK": "x", "MASTER_ADDR": "a"}, "^RANK is 'x': set it to a number"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_PORT": "x"}, "PET_MASTER_PORT is 'x': set it to a"),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT 0: set it to a port"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK 2 of 2 nodes"),
        ({"NNODES": "0"}, "NNODES 0: set it to how many nodes there are"),
        (
            {"NNODES": "3", "NODE_RANK": "0", "MASTER_ADDR": "a"},
            "wants 8 processes, the same number on each node, but NNODES is 3",
        ),
    ],
)
def test_nodes_that_do_not_fit_are_refused(environment: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        planned("h200_tp1_bp8", "gsm8k", **environment)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "cpu", "demo", "--overwritten"], "run: No such option: --overwritten"),
        (["serve", "cpu", "demo", "--overwrite"], "serve: No such option: --overwrite"),
        (["run", "cpu", "demo", "some", "other"], "run: Got unexpected extra argument"),
    ],
)
def test_what_every_process_would_refuse_is_refused_before_one_is_started(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan_job(arguments, {})


def test_options_of_the_bench_are_checked_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        plan_job(["bench", "cpu", "demo", "--shape", "1x64", "--bogus"], {})
    assert "unrecognized arguments: --bogus" in capsys.readouterr().err
    job, _, _ = plan_job(["bench", "cpu", "demo", "--shapes", "1x64"], {})
    assert not job.needs_input and job.worker[2:4] == ["bench", "steps"]


def test_a_server_needs_no_input() -> None:
    job, _, _ = plan_job(["serve", "cpu", "demo", "--port", "0"], {})
    assert not job.needs_input and job.worker[-2:] == ["--port", "0"]


def test_scripts_take_a_models_folder_too() -> None:
    folder = str(ROOT / "models" / "demo_block")
    job, _, run = plan_job(["serve", "cpu", folder], {})
    assert run.preset == "sdar" and job.worker[-1] == folder


def test_a_mesh_is_dealt_evenly_over_the_nodes() -> None:
    profile = profile_of(mesh=MESH_8)
    assert processes_here(profile, Nodes(count=2)) == 4
    with pytest.raises(
        ConfigError, match="wants 8 processes, the same number on each node, but NNODES is 3: set NNODES"
    ):
        processes_here(profile, Nodes(count=3))


def test_dry_run_prints_the_command_and_starts_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "DRY_RUN": "true", "PYTHON": sys.executable}
    script = [str(ROOT / "scripts/run_batch.sh"), "ascend_910c_tp4_bp4", "demo", "--set", "input.prompt_template=a b"]
    result = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "export HCCL_OP_EXPANSION_MODE=AIV" in result.stdout
    assert "--nproc-per-node=16" in result.stdout
    assert "--set 'input.prompt_template=a b'" in result.stdout
    assert not list(tmp_path.iterdir())


def test_a_printed_command_steers_no_terminal_and_a_shell_reads_what_was_given() -> None:
    words = ["a b", "it's", "\x1b[31m", "a\nrm -rf x", "\u202e\\'", "\udcff", "ü", "", "$(x)"]
    line = as_shell(words)
    assert line.isprintable() and as_shell(["ü", "a b"]) == "'ü' 'a b'"
    read = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True).stdout
    assert read.split(b"\0")[:-1] == [os.fsencode(word) for word in words]
    job = job_of(["-m", *words], profile_of(environment={"X": "\x1b"}), {}, needs_input=False)
    assert all(map(str.isprintable, job.script().splitlines())) and "export X=$'\\x1b'" in job.script()


@pytest.mark.parametrize(
    ("script", "arguments", "variables"),
    [("run_batch.sh", ["cpu", "demo"], {"PYTHON": "/a\x1b[2J"}), ("lab/study.sh", ["cpu", "--a\x1b[2J"], {})],
)
def test_what_a_script_says_steers_no_terminal(script: str, arguments: list[str], variables: dict[str, str]) -> None:
    command, environment = [str(ROOT / "scripts" / script), *arguments], {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.rstrip("\n").isprintable() and r"a\E[2J" in done.stderr


@pytest.mark.parametrize(("name", "value"), [("LIMIT", "30m"), ("TOTAL", "08"), ("LIMIT", "$(touch x)")])
def test_seconds_of_the_first_run_are_numbers(name: str, value: str, tmp_path: Path) -> None:
    command, environment = [str(ROOT / "scripts/first_910c_run.sh"), str(tmp_path / "out")], {**os.environ, name: value}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.startswith("lopa: LIMIT or TOTAL is ") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_archive_of_the_first_run_replaces_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "out.tar.gz").write_text("mine")
    command = [str(ROOT / "scripts/first_910c_run.sh"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "out.tar.gz is there and of no earlier run" in done.stderr
    assert (tmp_path / "out.tar.gz").read_text() == "mine"


@pytest.mark.parametrize("script", ["lab/study.sh", "first_910c_run.sh"])
def test_every_script_reads_a_dry_run_alike(script: str, tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / script), str(tmp_path / "out")]
    environment = {**os.environ, "DRY_RUN": "ture", "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and not done.stdout and not list(tmp_path.iterdir())
    assert done.stderr == "lopa: DRY_RUN is ture: set it to true, which prints what would start, or unset it\n"


def test_an_interrupt_before_anything_is_started_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "plan_job", interrupt)
    assert job.main(["run", "cpu", "demo"]) == 130
    assert capsys.readouterr().err == "lopa: stopped by SIGINT\n"


@pytest.mark.parametrize("command", [["run", "cpu", "demo"], ["evaluate", "cpu", "demo", "demo"]])
def test_a_dry_run_that_says_neither_yes_nor_no_starts_nothing(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRY_RUN", "ture")
    assert job.main(command) == 2
    assert capsys.readouterr().err == (
        "lopa: DRY_RUN is 'ture': set it to true, which prints what would start, or unset it\n"
    )
