"""Start the ranks of ascend_worker.py on a model made for them, and collect what they decoded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.checkpoint import load_model_config
from common.checkpoint.rules import checkpoint_shapes

WORKER = Path(__file__).with_name("ascend_worker.py")
ROOT = WORKER.parents[2]
SETTINGS = ("k=7", "k=3 fresh", "k=7 T=0.3", "k=1 T=1")
PATHS = [str(ROOT), str(ROOT / "tests" / "npu"), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(PATHS),
    "OMP_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "HCCL_DETERMINISTIC": "true",  # simulated devices then round sums as gloo does
}
Mesh = tuple[int, int, int]
Decoded = dict[str, dict[str, list[int]]]  # setting -> request -> steps, tokens


def write_model(folder: Path) -> Path:
    """A random one with 4 KV heads, so that it can be cut in four."""
    config = {
        "model_type": "Dream", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512, "rope_theta": 1e4,
        "rms_norm_eps": 1e-6, "mask_token_id": 310, "eos_token_id": 300,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in checkpoint_shapes(load_model_config(folder)).items():
        gain = 6.0 if "lm_head" in name else 1.5
        random = torch.randn(shape, generator=draw) * (1.0 if "embed" in name else gain / shape[-1] ** 0.5)
        weights[name] = torch.ones(shape) if "norm" in name else random
    save_file(weights, folder / "model.safetensors")
    return folder


def worker(model: Path, output: Path, mesh: Mesh, settings: Sequence[str] = SETTINGS, **profile: Any) -> list[str]:
    """profile: keys beside the mesh; device cpu and dtype float32 if not given."""
    axes = ("data_parallel_size", "branch_parallel_size", "tensor_parallel_size")
    profile = {"device": "cpu", "dtype": "float32", "mesh": dict(zip(axes, mesh, strict=True)), **profile}
    return [str(WORKER), str(model), str(output), json.dumps(profile), *settings]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> None:
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed[-3000:]


def decoded(model: Path, output: Path, mesh: Mesh, settings: Sequence[str] = SETTINGS, **profile: Any) -> Decoded:
    output.mkdir()
    finish(start(worker(model, output, mesh, settings, **profile)))
    return merged(output, mesh)


def merged(output: Path, mesh: Mesh) -> Decoded:
    """Return what all replicas decoded; all ranks of a replica must say the same."""
    ranks = [json.loads(path.read_text()) for path in sorted(output.glob("rank*.json"))]
    assert len(ranks) == mesh[0] * mesh[1] * mesh[2]
    replicas = [[rank["tokens"] for rank in ranks if rank["dp"] == dp] for dp in range(mesh[0])]
    assert all(tokens == replica[0] for replica in replicas for tokens in replica)
    return {name: {k: v for replica in replicas for k, v in replica[0][name].items()} for name in replicas[0][0]}
