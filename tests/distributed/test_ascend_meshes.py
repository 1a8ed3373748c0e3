"""The Ascend engine on several processes: tokens do not depend on the mesh, and branch ranks agree on committed KV
without sending any (the worker compares it before every commit)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.models.config import load_model_config
from common.weights import checkpoint_shapes

WORKER = Path(__file__).with_name("ascend_worker.py")
ROOT = WORKER.parents[2]
MESHES = [(1, 2, 2), (1, 4, 4)]
PATHS = [str(ROOT), str(ROOT / "tests" / "npu"), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(PATHS),
    "OMP_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
Decoded = dict[str, dict[str, list[int]]]  # setting -> request -> steps, tokens


def mesh_name(mesh: tuple[int, int, int]) -> str:
    return "dp{}-bp{}-tp{}".format(*mesh)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, with 4 KV heads, so that it can be cut in four."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "model_type": "Dream", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512, "rope_theta": 1e4,
        "rms_norm_eps": 1e-6, "mask_token_id": 310, "eos_token_id": 300,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in checkpoint_shapes(load_model_config(folder)).items():
        scale = 1.0 if "embed" in name else 6.0 if "lm_head" in name else 1.5
        random = torch.randn(shape, generator=draw) * scale / shape[-1] ** (0 if "embed" in name else 0.5)
        weights[name] = torch.ones(shape) if "norm" in name else random
    save_file(weights, folder / "model.safetensors")
    return folder


def worker(model: Path, output: Path, mesh: tuple[int, int, int], device: str, dtype: str) -> list[str]:
    return [str(WORKER), str(model), str(output), *map(str, mesh), device, dtype]


def finish(process: subprocess.Popen[str]) -> None:
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed[-3000:]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def decoded(model: Path, output: Path, mesh: tuple[int, int, int], device: str = "cpu", dtype: str = "float32") -> Any:
    output.mkdir()
    finish(start(worker(model, output, mesh, device, dtype)))
    return merged(output, mesh)


def merged(output: Path, mesh: tuple[int, int, int]) -> Decoded:
    """Of all replicas; within one, every rank says the same."""
    ranks = [json.loads(path.read_text()) for path in sorted(output.glob("rank*.json"))]
    assert len(ranks) == mesh[0] * mesh[1] * mesh[2]
    replicas = [[rank["tokens"] for rank in ranks if rank["dp"] == dp] for dp in range(mesh[0])]
    assert all(tokens == replica[0] for replica in replicas for tokens in replica)
    return {name: {k: v for replica in replicas for k, v in replica[0][name].items()} for name in replicas[0][0]}


@pytest.fixture(scope="session")
def single(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Decoded:
    tokens: Decoded = decoded(model, tmp_path_factory.mktemp("single") / "out", (1, 1, 1))
    assert all(len(set(canvas)) > 3 for requests in tokens.values() for _, *canvas in requests.values())
    return tokens


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_name)
def test_the_mesh_does_not_change_the_tokens(
    model: Path, single: Decoded, mesh: tuple[int, int, int], tmp_path: Path
) -> None:
    assert decoded(model, tmp_path / "out", mesh) == single


def test_two_nodes_of_four_processes_are_one_machine(model: Path, single: Decoded, tmp_path: Path) -> None:
    """The branch axis crosses the nodes: their processes meet over the address that both launchers are told."""
    mesh = (1, 4, 2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=4", "--master-addr=127.0.0.1"]
    ranks = [f"--master-port={port}", *worker(model, tmp_path, mesh, "cpu", "float32")]
    nodes = [start([*launcher, f"--node-rank={rank}", *ranks]) for rank in range(2)]
    for node in nodes:
        finish(node)
    assert merged(tmp_path, mesh) == single
