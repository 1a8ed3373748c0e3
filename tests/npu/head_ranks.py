"""What the ranks of test_npu_head.py do: the same sampled head, captured, on meshes of several sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from common.decoding import Sampling
from common.model import NUM_SAMPLING_FIELDS, SamplingRows, sampling_fields
from common.processes import Mesh
from common.runtime import Collectives
from graphs.npu import NpuCapture
from lopa_ascend.steps.halves import SampledHead

NUM_READS, WIDTH, VOCAB, MASK = 24, 16, 1200, 1100
CUTS = ((1.0, 0), (0.9, 0), (1.0, 20))


def sampled_tokens() -> dict[str, list[list[int]]]:
    """Return the tokens at temperature 0.7 for each mesh (tp, bp) that these ranks can make and each of CUTS."""
    found = {}
    for tp in (1, 2, 4):
        for bp in (1, 2):
            if bp * tp > dist.get_world_size():
                continue
            axes = init_device_mesh(
                "npu", (dist.get_world_size() // (bp * tp), bp, tp), mesh_dim_names=("dp", "bp", "tp")
            )
            groups = {f"{axis}_group": axes.get_group(axis) for axis, size in (("bp", bp), ("tp", tp)) if size > 1}
            places = {"bp_rank": axes.get_local_rank("bp"), "tp_rank": axes.get_local_rank("tp")}
            found[f"{tp} {bp}"] = _tokens(Mesh(bp_size=bp, tp_size=tp, **places, **groups))
    dist.barrier()
    return found


@torch.no_grad()
def _tokens(mesh: Mesh) -> list[list[int]]:
    hidden_MD, weight_VD = (_whole_numbers(rows, seed) for seed, rows in enumerate((NUM_READS, VOCAB)))
    mine = slice(mesh.bp_rank, None, mesh.bp_size)
    shard = nn.Linear(WIDTH, VOCAB // mesh.tp_size, bias=False, dtype=torch.bfloat16)
    shard.weight.copy_(weight_VD.chunk(mesh.tp_size)[mesh.tp_rank] / 16)
    ops = SimpleNamespace(linear=lambda x, module: module(x))
    vocab_start = mesh.tp_rank * VOCAB // mesh.tp_size
    model: Any = SimpleNamespace(lm_head=shard.to("npu"), ops=ops, vocab_start=vocab_start)
    tokens = []
    for top_p, top_k in CUTS:
        sampling = Sampling("neg_entropy", MASK, is_sampled=True, is_cut=top_p < 1 or top_k > 0)
        head = SampledHead(model, Collectives(mesh), sampling)
        fields_6M = _fields(top_p, top_k)[:, mine]
        predicted_PM3 = _replayed(head, hidden_MD[mine].to("npu"), torch.from_numpy(np.ascontiguousarray(fields_6M)))
        tokens.append(predicted_PM3.cpu()[..., 0].T.flatten().int().tolist())
    return tokens


def _replayed(head: SampledHead, hidden_MD: Tensor, fields_6M: Tensor) -> Tensor:
    """Captured with other rows than it is replayed with."""
    on_device = torch.ones((NUM_SAMPLING_FIELDS, hidden_MD.shape[0]), dtype=torch.int32, device="npu")
    rows, predicted_PM3 = SamplingRows.of(on_device), torch.zeros((head.collectives.mesh.bp_size, len(hidden_MD), 3))
    predicted_PM3 = predicted_PM3.to("npu")

    def work() -> None:
        predicted_PM3.copy_(head(hidden_MD, rows))

    work()
    replay = NpuCapture()(work)
    on_device.copy_(fields_6M)
    replay()
    return predicted_PM3


def _fields(top_p: float, top_k: int) -> np.ndarray:
    settings = np.array((0.7, top_p, top_k), dtype=np.float32)[:, None].repeat(NUM_READS, axis=1)
    position = np.arange(NUM_READS)
    return sampling_fields(settings, position // 5, np.full(NUM_READS, 3), position, NUM_READS)


def _whole_numbers(num_rows: int, seed: int) -> Tensor:
    """Small, so that products are exact however they are cut."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (num_rows, WIDTH), generator=draw).bfloat16()
