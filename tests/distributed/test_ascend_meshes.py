"""The Ascend engine on several processes: tokens do not depend on the mesh, and branch ranks agree on committed KV
without sending any (the worker compares it before every commit)."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.distributed.ascend_launch import Decoded, Mesh, decoded, finish, merged, start, worker, write_model
from tests.soaking import soaking

pytestmark = pytest.mark.slow
MESHES = [(1, 2, 2), pytest.param((1, 4, 4), marks=soaking)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def single(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Decoded:
    tokens = decoded(model, tmp_path_factory.mktemp("single") / "out", (1, 1, 1))
    assert all(len(set(canvas)) > 3 for requests in tokens.values() for _, *canvas in requests.values())
    return tokens


@pytest.mark.parametrize("mesh", MESHES, ids="dp{0[0]}-bp{0[1]}-tp{0[2]}".format)
def test_the_mesh_does_not_change_the_tokens(model: Path, single: Decoded, mesh: Mesh, tmp_path: Path) -> None:
    assert decoded(model, tmp_path / "out", mesh) == single


def test_two_nodes_of_four_processes_are_one_machine(model: Path, single: Decoded, tmp_path: Path) -> None:
    """The branch axis crosses the nodes: their processes meet over the address that both launchers are told."""
    mesh = (1, 4, 2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=4", "--master-addr=127.0.0.1"]
    ranks = [f"--master-port={port}", *worker(model, tmp_path, mesh)]
    nodes = [start([*launcher, f"--node-rank={rank}", *ranks]) for rank in range(2)]
    for node in nodes:
        finish(node)
    assert merged(tmp_path, mesh) == single
