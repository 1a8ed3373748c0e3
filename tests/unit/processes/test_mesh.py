"""Where each process stands, and with whom it forms a group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.config import DeviceProfile, MeshConfig, RunConfig
from common.errors import ConfigError, MissingCapability
from common.platforms import GroupBackends, build_engine, platform_of, platform_of_device
from common.processes import mesh as launch

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "NNODES", "NODE_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def started_as_one_of(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(count))


def profile_of(**changes: Any) -> DeviceProfile:
    return DeviceProfile.model_validate({"name": "p", "engine": "lopa_cuda", "device": "cpu", **changes})


MESH_8 = {"data_parallel_size": 2, "branch_parallel_size": 2, "tensor_parallel_size": 2}


def test_one_process_opens_no_process_group() -> None:
    mesh = launch.init_mesh(profile_of(), GroupBackends("gloo"))
    assert (mesh.world_size, mesh.bp_group, mesh.tp_group, mesh.is_leader) == (1, None, None, True)


def test_a_wrong_number_of_processes_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"wants 8 processes \(dp 2 x bp 2 x tp 2\) but 1 was started"):
        launch.init_mesh(profile_of(mesh=MESH_8), GroupBackends("gloo"))
    started_as_one_of(4, monkeypatch)
    with pytest.raises(ConfigError, match=r"wants 1 processes .* but 4 were started"):
        launch.init_mesh(profile_of(), GroupBackends("gloo"))


@pytest.mark.parametrize("pod", [{"LOCAL_RANK": "0,1,2,3", "LOCAL_WORLD_SIZE": "4"}, {}], ids=["AscendJob", "Volcano"])
def test_a_pods_variables_are_not_a_ranks(pod: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "8", **pod}.items():
        monkeypatch.setenv(name, value)
    assert launch.init_mesh(profile_of(), GroupBackends("gloo")).world_size == 1
    monkeypatch.setattr(platform_of_device("cuda"), "num_visible_devices", lambda: 2)
    assert launch.resolve_mesh(profile_of(device="cuda", mesh="auto")).num_processes == 2


def test_auto_takes_every_process_for_branches_and_on_ascend_four_of_them_for_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for device in ("cuda", "npu"):
        monkeypatch.setattr(platform_of_device(device), "num_visible_devices", lambda: 8)
    sizes = launch.resolve_mesh(profile_of(device="cuda", mesh="auto"))
    assert sizes == MeshConfig(branch_parallel_size=8)
    sizes = launch.resolve_mesh(profile_of(engine="auto", device="npu", mesh="auto"))
    assert sizes == MeshConfig(branch_parallel_size=2, tensor_parallel_size=4)
    started_as_one_of(6, monkeypatch)
    assert launch.resolve_mesh(profile_of(device="cuda", mesh="auto")).num_processes == 6


def test_auto_picks_the_engine_of_the_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert platform_of(profile_of(engine="auto")).engine == "lopa_cuda"
    assert platform_of(profile_of(engine="lopa_ascend")).engine == "lopa_ascend"
    npu = platform_of_device("npu")
    monkeypatch.setattr(npu, "num_visible_devices", lambda: 1)
    assert platform_of(profile_of(engine="auto", device="npu")).engine == "lopa_ascend"
    monkeypatch.setattr(npu, "num_visible_devices", lambda: 0)
    with pytest.raises(MissingCapability, match="no npu device is visible"):
        build_engine(profile_of(engine="auto", device="npu"), RunConfig(model="m"))


_WORKER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from common.config import DeviceProfile
from common.platforms import GroupBackends
from common.processes import close_mesh, init_mesh, share_from_first, wait_for_all
import torch, torch.distributed as dist
profile = DeviceProfile.model_validate_json(sys.argv[2])
mesh = init_mesh(profile, GroupBackends("gloo"))
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


@pytest.mark.slow
def test_tensor_parallel_groups_are_adjacent_ranks(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(_WORKER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    sizes = {"branch_parallel_size": 2, "tensor_parallel_size": 2}
    worker = ["worker.py", str(ROOT), profile_of(mesh=sizes).model_dump_json()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, "--nproc-per-node=4", *worker], cwd=tmp_path, env=environment, check=True, timeout=300)
    for rank in range(4):
        place, members, shared = json.loads((tmp_path / f"{rank}.json").read_text())
        assert place == [0, rank // 2, rank % 2, rank == 0]
        assert members == {"tp": [rank // 2 * 2, rank // 2 * 2 + 1], "bp": [rank % 2, rank % 2 + 2]}
        assert shared == [41]
