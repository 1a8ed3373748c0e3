"""What the ranks of the distributed tests do; see sim/ranks.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from branches import CASES, HEAD_SIZE, lay_out
from layer import TINY, Inputs, Sizes, Weights, draw_inputs, draw_weights, run_layer
from sim.calls import SimulationError
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from common.config import DeviceProfile, NpuConfig
from common.processes import Mesh
from graphs.npu import NpuCapture
from graphs.runner import Agree, CaptureRefused, GraphRunner, Replay
from lopa_ascend.ops import AttentionForm, npu_ops
from lopa_ascend.selftest import Sizes as SelftestSizes
from lopa_ascend.selftest import choose
from lopa_ascend.selftest.checks import Bench
from lopa_ascend.selftest.in_graphs import all_reduce, replayed_with_collectives
from lopa_ascend.steps import agreements

CASE = "shift rows of several branches"


def collectives() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), float(rank + 1)).bfloat16().npu()
    dist.all_reduce(x)
    total = world * (world + 1) / 2
    assert x.tolist() == [total] * 4
    gathered = torch.empty(world * 2, device="npu")
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank), device="npu"))
    assert gathered.tolist() == [float(r) for r in range(world) for _ in range(2)]
    mine = torch.full((2,), float(rank), device="npu")
    dist.broadcast(mine, 1)
    assert mine.tolist() == [1.0, 1.0]
    works = [dist.all_reduce(torch.full((1 << 14,), float(rank), device="npu"), async_op=True) for _ in range(4)]
    for work in works:
        work.wait()
    on_host = torch.ones(1)
    dist.all_reduce(on_host)
    assert on_host.item() == world


def groups_per_axis() -> list[float]:
    """Sums over each axis of a (dp, bp, tp) mesh of two each."""
    mesh = init_device_mesh("npu", (2, 2, 2), mesh_dim_names=("dp", "bp", "tp"))
    sums = []
    for axis in ("dp", "bp", "tp"):
        x = torch.tensor([float(dist.get_rank())]).npu()
        dist.all_reduce(x, group=mesh.get_group(axis))
        sums.append(x.item())
    return sums


def captured_collective() -> None:
    rank = dist.get_rank()
    x = torch.full((4,), float(rank + 1), device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        doubled = x * 2
        dist.all_reduce(doubled)
        y = doubled + 1
    graph.replay()
    assert y.tolist() == [7.0] * 4
    x.fill_(1)
    graph.replay()
    assert y.tolist() == [5.0] * 4


def collectives_that_do_not_pair() -> list[str]:
    """What is raised where rank 0 replays what rank 1 calls, and where the two replay different captures."""
    x, graphs = torch.ones(4, device="npu"), []
    for _ in range(2):
        dist.all_reduce(x)
        graphs.append(torch.npu.NPUGraph())
        with torch.npu.graph(graphs[-1]):
            dist.all_reduce(x)
    calls = [(graphs[0].replay, lambda: dist.all_reduce(x)), (graphs[0].replay, graphs[1].replay)]
    told = [_error_of(by_rank[dist.get_rank()]) for by_rank in calls]
    assert x.tolist() == [4.0] * 4  # captures ran nothing, and neither did what did not pair
    return told


def _error_of(call: Callable[[], object]) -> str:
    with pytest.raises(SimulationError) as found:
        call()
    return str(found.value)


def one_rank_refuses() -> list[object]:
    """Sums of three captured sizes where rank 1's device has room for one graph, then how many each rank captured, and
    what becomes of it where ranks do not agree."""
    mesh = Mesh(tp_size=2, tp_rank=dist.get_rank(), rank=dist.get_rank())
    found = _sums_of_runner(agreements(mesh, 60.0)[0])
    return [found, _error_of(lambda: _sums_of_runner(bool))]


def _sums_of_runner(agree: Agree) -> list[float]:
    captures = NpuCapture()

    class Capture:
        def __call__(self, work: Replay) -> Replay:
            if dist.get_rank() == 1 and runner.num_captured:
                raise CaptureRefused("207008")
            return captures(work)

        def allocated_bytes(self) -> int:
            return 0

    def double(size: int, x: Tensor) -> None:
        dist.all_reduce(x)

    runner = GraphRunner("r", lambda size: torch.zeros(size, device="npu"), double, Capture(), agree=agree)
    sums = []
    for size in (4, 5, 4, 6, 5):
        entry = runner.entry(size)
        entry.buffers.fill_(dist.get_rank() + size)
        entry.run()
        sums.append(entry.buffers[0].item())
    return [*sums, runner.num_captured]


def tensor_parallel_layer() -> float:
    """How far the layer over all ranks is from the unsharded one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ops, layout = npu_ops(), lay_out(CASES[CASE], "npu")
    weights, inputs = draw_weights(TINY), draw_inputs(TINY, layout)
    whole, _ = run_layer(ops, TINY, weights.to("npu"), inputs.to("npu"), layout)
    sizes = Sizes(TINY.width, TINY.num_heads // world, TINY.num_kv_heads // world, TINY.intermediate // world)
    shard = _shard(weights, rank, world).to("npu").in_nz(ops)
    local = _local_cache(inputs, rank, world).to("npu")
    sharded, _ = run_layer(ops, sizes, shard, local, layout, dist.group.WORLD)
    whole, sharded = whole.cpu().double(), sharded.cpu().double()
    return float((sharded - whole).norm() / whole.norm())


def _shard(weights: Weights, rank: int, world: int) -> Weights:
    """Columns of qkv (by head) and gate_up (by half), rows of o and down."""
    q, kv = TINY.num_heads * HEAD_SIZE, TINY.num_kv_heads * HEAD_SIZE
    qkv = torch.cat([_span(0, q, rank, world), _span(q, kv, rank, world), _span(q + kv, kv, rank, world)])
    half = TINY.intermediate
    gate_up = torch.cat([_span(0, half, rank, world), _span(half, half, rank, world)])
    values, scales = dict(weights.values), dict(weights.scales)
    for name, columns in (("qkv", qkv), ("gate_up", gate_up)):
        values[name] = values[name][:, columns].contiguous()
        scales[name] = scales[name][columns]
    for name in ("o", "down"):
        values[name] = values[name].chunk(world)[rank].contiguous()
    return replace(weights, values=values, scales=scales, qkv_bias=weights.qkv_bias[qkv])


def _span(start: int, length: int, rank: int, world: int) -> Tensor:
    part = length // world
    return torch.arange(start + rank * part, start + (rank + 1) * part)


def _local_cache(inputs: Inputs, rank: int, world: int) -> Inputs:
    keys, values = (cache.chunk(world, 2)[rank].contiguous() for cache in (inputs.key_cache, inputs.value_cache))
    return replace(inputs, key_cache=keys, value_cache=values)


def replay_with_collectives() -> tuple[list[object], int]:
    """Grade and detail as it is; the grade where a sum over tp counts one rank twice."""
    device_mesh = init_device_mesh("npu", (2, 2), mesh_dim_names=("bp", "tp"))
    mesh = Mesh(bp_size=2, tp_size=2, bp_group=device_mesh.get_group("bp"), tp_group=device_mesh.get_group("tp"))
    sizes = SelftestSizes(width=256, num_heads=2, num_kv_heads=1, inner=128)
    bench = Bench(npu_ops(), sizes, torch.device("npu", dist.get_rank()))
    grade, detail = replayed_with_collectives(bench, mesh)
    spoiled, _ = replayed_with_collectives(bench, replace(mesh, tp_size=1))
    return [int(grade), detail], int(spoiled)


def sums_over_ranks() -> list[object]:
    """Grade and detail of the self-test's sum over four ranks, at the size of a step of 200 tokens."""
    sizes = SelftestSizes(width=256, num_heads=2, num_kv_heads=1, inner=128, step_tokens=200)
    group = dist.group.WORLD
    assert group is not None
    grade, detail = all_reduce(Bench(npu_ops(), sizes, torch.device("npu", dist.get_rank())), group, 4)
    return [int(grade), detail]


def settled_form() -> AttentionForm:
    """Version 2 is the fastest on rank 0 and wrong on rank 1; of version 1, 4-D pages are the faster on rank 0 only."""
    rank, seconds = dist.get_rank(), {0: [9.0, 1.0, 8.0, 1.0], 1: [2.0, 3.0]}[dist.get_rank()]
    choose.median_seconds = lambda work, device: seconds.pop(0)
    ops = npu_ops()
    if rank == 1:
        import torch_npu

        torch_npu.npu_fused_infer_attention_score_v2 = lambda query, *_, **__: (query * 0, None)
    sizes = SelftestSizes(width=256, num_heads=2, num_kv_heads=1, inner=128)
    profile = DeviceProfile(name="p", engine="lopa_ascend", device="npu", npu=NpuConfig(attention="auto"))
    return choose.settle(ops, sizes, torch.device("npu", rank), Mesh(tp_size=2, rank=rank), profile).attention


def place() -> tuple[int, int, str]:
    return dist.get_rank(), torch.npu.current_device(), os.environ["LOCAL_RANK"]
