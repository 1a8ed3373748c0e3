"""Which processes a profile starts, where each of them stands, and whose message is shown when one fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common import launch
from common.config import ConfigError, DeviceProfile, MeshConfig
from common.engine import MissingCapability
from common.job import Nodes, plan_job, processes_here
from common.supervise import root_cause

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "NNODES", "NODE_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def profile_of(**changes: Any) -> DeviceProfile:
    return DeviceProfile.model_validate({"name": "p", "engine": "lopa_cuda", "device": "cpu", **changes})


MESH_8 = {"data_parallel_size": 2, "branch_parallel_size": 2, "tensor_parallel_size": 2}


# The mesh


def test_one_process_opens_no_process_group() -> None:
    mesh = launch.init_mesh(profile_of(), "gloo")
    assert (mesh.world_size, mesh.bp_group, mesh.tp_group, mesh.is_leader) == (1, None, None, True)


def test_a_wrong_number_of_processes_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"wants 8 processes \(dp 2 x bp 2 x tp 2\) but 1 was started"):
        launch.init_mesh(profile_of(mesh=MESH_8), "gloo")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"wants 1 processes .* but 4 were started"):
        launch.init_mesh(profile_of(), "gloo")


def test_auto_takes_every_process_for_branches_and_on_ascend_four_of_them_for_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "num_visible_devices", lambda device: 8)
    sizes = launch.resolve_mesh(profile_of(device="cuda", mesh="auto"))
    assert sizes == MeshConfig(branch_parallel_size=8)
    sizes = launch.resolve_mesh(profile_of(engine="auto", device="npu", mesh="auto"))
    assert sizes == MeshConfig(branch_parallel_size=2, tensor_parallel_size=4)
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert launch.resolve_mesh(profile_of(device="cuda", mesh="auto")).num_processes == 6


def test_auto_picks_the_engine_of_the_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.resolve_engine(profile_of(engine="auto")) == "lopa_cuda"
    assert launch.resolve_engine(profile_of(engine="lopa_ascend")) == "lopa_ascend"
    monkeypatch.setattr(launch, "num_visible_devices", lambda device: 1)
    assert launch.resolve_engine(profile_of(engine="auto", device="npu")) == "lopa_ascend"
    monkeypatch.setattr(launch, "num_visible_devices", lambda device: 0)
    with pytest.raises(MissingCapability, match="no npu device is visible"):
        launch.resolve_engine(profile_of(engine="auto", device="npu"))


_WORKER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from common.config import DeviceProfile
from common.launch import close_mesh, init_mesh, share_from_first, wait_for_all
import torch, torch.distributed as dist
profile = DeviceProfile.model_validate_json(sys.argv[2])
mesh = init_mesh(profile, "gloo")
members = {}
for axis, group in (("bp", mesh.bp_group), ("tp", mesh.tp_group)):
    ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(ranks, torch.tensor([mesh.rank]), group=group)
    members[axis] = [int(rank) for rank in ranks]
shared = share_from_first([mesh.rank + 41])
wait_for_all(lambda: None)
place = [mesh.dp_rank, mesh.bp_rank, mesh.tp_rank, mesh.is_leader]
open(f"{mesh.rank}.json", "w").write(json.dumps([place, members, shared]))
close_mesh()
"""


def test_tensor_parallel_groups_are_adjacent_ranks(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(_WORKER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    sizes = {"branch_parallel_size": 2, "tensor_parallel_size": 2}
    worker = ["worker.py", str(ROOT), profile_of(mesh=sizes).model_dump_json()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, "--nproc-per-node=4", *worker], cwd=tmp_path, env=environment, check=True, timeout=120)
    for rank in range(4):
        place, members, shared = json.loads((tmp_path / f"{rank}.json").read_text())
        assert place == [0, rank // 2, rank % 2, rank == 0]
        assert members == {"tp": [rank // 2 * 2, rank // 2 * 2 + 1], "bp": [rank % 2, rank % 2 + 2]}
        assert shared == [41]


# What is started


def planned(*arguments: str, **environment: str) -> list[str]:
    return plan_job(["run", *arguments], environment)[0].script().splitlines()


def test_one_process_is_started_directly() -> None:
    *exports, command = planned("cpu", "demo", "--set", "decode.num_lookahead=1", "--overwrite")
    assert [export.partition("=")[0] for export in exports] == ["export OMP_NUM_THREADS"]
    assert command == (
        f"{sys.executable} -m common.cli run --profile {ROOT}/configs/profiles/cpu.yaml {ROOT}/configs/runs/demo.yaml"
        " --overwrite --set decode.num_lookahead=1"
    )


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


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NNODES": "two"}, "NNODES is 'two': set it to a number"),
        ({"NNODES": "2"}, "NNODES is 2 but MASTER_ADDR is not set"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK 2 of 2 nodes"),
        ({"NNODES": "3", "MASTER_ADDR": "a"}, "wants 8 processes, the same number on each node, but NNODES is 3"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(environment: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        planned("h200_tp1_bp8", "gsm8k", **environment)


def test_a_profile_may_say_how_many_processes_a_node_holds() -> None:
    profile = profile_of(mesh=MESH_8, processes_per_node=4)
    assert processes_here(profile, Nodes(count=2)) == 4
    with pytest.raises(ConfigError, match="wants 8 processes, at 4 a node, but NNODES is 1: set NNODES to 2"):
        processes_here(profile, Nodes())


def test_dry_run_prints_the_command_and_starts_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "DRY_RUN": "true", "PYTHON": sys.executable}
    script = [str(ROOT / "scripts/run_batch.sh"), "ascend_910c_tp4_bp4", "gsm8k", "--set", "input.prompt_template=a b"]
    result = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "export HCCL_OP_EXPANSION_MODE=AIV" in result.stdout
    assert "--nproc-per-node=16" in result.stdout
    assert "--set 'input.prompt_template=a b'" in result.stdout
    assert not list(tmp_path.iterdir())


# Who is to blame


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


def test_a_stopped_rank_that_had_to_be_killed_is_not_the_cause() -> None:
    failures = {0: Failure(2, told("the device has not answered", 99.0)), 1: Failure(-signal.SIGKILL, timestamp=129)}
    assert root_cause(failures) == ("rank 0 failed: the device has not answered", 2)


def test_of_ranks_that_were_all_ended_the_first_is_the_cause() -> None:
    failures = {0: Failure(-signal.SIGTERM, timestamp=101), 1: Failure(143, told("stopped by SIGTERM", 99.0))}
    assert root_cause(failures) == ("rank 1 failed: stopped by SIGTERM", 143)


def test_a_defect_points_to_its_own_traceback() -> None:
    assert root_cause({5: Failure(1)}) == ("rank 5 failed with exit code 1; its own output is above", 1)
