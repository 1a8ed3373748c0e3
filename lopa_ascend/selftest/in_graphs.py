"""The self-test's checks of what graphs add: attention at other lengths than it was captured at, and beside the
collectives of a step."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.processes import Mesh
from lopa_ascend.ops import Ops, VirtualRows, lower_attention
from lopa_ascend.selftest.checks import LATER, NUM_TOKENS, ROWS, SCALE, Bench, attention_inputs, virtual_rows
from lopa_ascend.selftest.grades import Grade, Verdict, compare


def replayed_attention(bench: Bench) -> Verdict:
    """Attention captured at one set of lengths and replayed at another: with the update of its tasks before the launch,
    without one, and at the first again, with the update after the launch."""
    return _replayed(bench, lambda attended: attended)


def replayed_with_collectives(bench: Bench, mesh: Mesh) -> Verdict:
    """The same followed by the collectives of a step in one graph: the sum over tp, then what bp gathers.

    Every rank attends to the same, so the sum is tp times it and each gathered part equals it.
    """

    def collect(attended: Tensor) -> Tensor:
        if mesh.tp_group is not None:
            dist.all_reduce(attended, group=mesh.tp_group)
            attended = attended / mesh.tp_size
        if mesh.bp_group is not None:
            gathered = attended.new_empty(mesh.bp_size * len(attended), *attended.shape[1:])
            dist.all_gather_into_tensor(gathered, attended, group=mesh.bp_group)
            attended = gathered[-len(attended) :]
        return attended

    verdict = _replayed(bench, collect)
    expansion = os.environ.get("HCCL_OP_EXPANSION_MODE", "unset")
    return Verdict(verdict.grade, f"{verdict.detail} (HCCL_OP_EXPANSION_MODE {expansion})")


def _replayed(bench: Bench, then: Callable[[Tensor], Tensor]) -> Verdict:
    from graphs.npu import NpuCapture

    inputs, capture = attention_inputs(bench), NpuCapture()
    query, keys, values = (tensor.to(bench.device) for tensor in inputs)
    rows, later = (virtual_rows(rows, bench.device) for rows in (ROWS, LATER))
    result = torch.zeros_like(query)

    def work() -> None:
        result.copy_(then(bench.ops.paged_attention(query, keys, values, rows, SCALE)))

    work()  # groups meet here, which no capture may wait for
    bench.finish()
    capture.lengths = bench.ops.attention_lengths(rows)
    replay, verdict = capture(work), Verdict(Grade.SAME, "equal")
    for updates, lengths in (("before", later), ("before", later), ("behind", rows)):
        capture.updates, capture.lengths = updates, bench.ops.attention_lengths(lengths)
        on_host = virtual_rows(LATER if lengths is later else ROWS, torch.device("cpu"))
        wanted = bench.twins.paged_attention(*inputs, on_host, SCALE)
        result.zero_()
        replay()
        bench.finish()
        verdict = max(verdict, compare([result.cpu()], [wanted], is_attention=True))
    return verdict


class _Attention(nn.Module):
    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self._ops = ops

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, rows: VirtualRows) -> Tensor:
        return self._ops.paged_attention(query, keys, values, rows, SCALE)


def lowered_attention(bench: Bench) -> Verdict:
    """Attention in a GE graph that is compiled once and run at two sets of lengths."""
    from graphs.npu import Torchair

    lower_attention()
    inputs = attention_inputs(bench)
    on_device = [tensor.to(bench.device) for tensor in inputs]
    attend, verdicts = Torchair()(_Attention(bench.ops), "selftest"), []
    for rows in (ROWS, LATER):
        found = attend(*on_device, virtual_rows(rows, bench.device).as_inputs())
        bench.finish()
        wanted = bench.twins.paged_attention(*inputs, virtual_rows(rows, torch.device("cpu")), SCALE)
        verdicts.append(compare([found.cpu()], [wanted], is_attention=True))
    return max(verdicts)


def all_reduce(bench: Bench, group: dist.ProcessGroup, size: int) -> Verdict:
    x = torch.full((NUM_TOKENS, bench.sizes.width), float(dist.get_rank(group) + 1)).bfloat16().to(bench.device)
    dist.all_reduce(x, group=group)
    bench.finish()
    wanted, found = size * (size + 1) / 2, x.cpu()
    if bool((found == wanted).all()):
        return Verdict(Grade.SAME, "equal")
    return Verdict(Grade.WRONG, f"the sum over {size} ranks is {float(found.flatten()[0])}, not {wanted}")


# Checks that a graph.mode adds.
GRAPH_CHECKS: dict[str, tuple[str, Callable[[Bench], Verdict]]] = {
    "npugraph": ("a replay of paged_attention", replayed_attention),
    "npugraph_ex": ("a replay of paged_attention", replayed_attention),
    "torchair": ("paged_attention in a GE graph", lowered_attention),
}
CAPTURING = ("npugraph", "npugraph_ex")
