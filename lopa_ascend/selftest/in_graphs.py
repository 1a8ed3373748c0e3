"""The self-test's checks of what graphs add: attention at other lengths than it was captured at, and beside the
collectives of a step."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.processes import Mesh
from graphs.hccl import EXPANSION
from graphs.runner import Agree, Capture, CaptureRefused, Replay
from lopa_ascend.load import HEAD_SIZE
from lopa_ascend.ops import Ops, VirtualRows, lower_attention
from lopa_ascend.selftest.checks import LATER, NUM_TOKENS, ROWS, SCALE, Bench, attention_inputs, virtual_rows
from lopa_ascend.selftest.grades import Grade, Verdict, compare
from lopa_ascend.selftest.ranks import most_of_all

LOG_LEVEL = "ASCEND_MODULE_LOG_LEVEL=HCCL=1"
_CHOICE = re.compile(r"allreduce SelectAlg.* algName \[(\w+)\]", re.IGNORECASE)


def replayed_attention(bench: Bench) -> Verdict:
    """Attention captured at one set of lengths and replayed at another: with the update of its tasks before the launch,
    without one, and at the first again, with the update after the launch."""
    return _replayed(bench, lambda attended: attended)


def replayed_with_collectives(bench: Bench, mesh: Mesh) -> Verdict:
    """The same followed by the collectives of a step in one graph: the sum over tp, of the size that it has in the
    largest step, then what bp gathers.

    Every rank attends to the same, so the sum is tp times it and each gathered part equals it.
    """

    num_copies = max(1, bench.sizes.step_tokens * bench.sizes.width // (NUM_TOKENS * bench.sizes.num_heads * HEAD_SIZE))

    def collect(attended: Tensor) -> Tensor:
        if mesh.tp_group is not None:
            summed = attended.repeat(num_copies, 1, 1)  # as much as the largest step sums
            dist.all_reduce(summed, group=mesh.tp_group)
            copies = (summed / mesh.tp_size).view(num_copies, *attended.shape)
            attended = copies[0] + (copies - copies[0]).abs().amax(0)  # wrong where one copy is
        if mesh.bp_group is not None:
            gathered = attended.new_empty(mesh.bp_size * len(attended), *attended.shape[1:])
            dist.all_gather_into_tensor(gathered, attended, group=mesh.bp_group)
            attended = gathered[-len(attended) :]
        return attended

    verdict = _replayed(bench, collect, lambda is_captured: most_of_all([float(not is_captured)], mesh) == [0.0])
    expansion = os.environ.get(EXPANSION, "unset")
    return Verdict(verdict.grade, f"{verdict.detail} ({EXPANSION} {expansion})")


def _replayed(bench: Bench, then: Callable[[Tensor], Tensor], agree: Agree = bool) -> Verdict:
    """agree: of all ranks whose graphs hold collectives with each other. Raises CaptureRefused."""
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
    replay, verdict = _captured(capture, work, agree), Verdict(Grade.SAME, "equal")
    for updates, lengths in (("before", later), ("before", later), ("after", rows)):
        capture.updates, capture.lengths = updates, bench.ops.attention_lengths(lengths)
        on_host = virtual_rows(LATER if lengths is later else ROWS, torch.device("cpu"))
        wanted = bench.twins.paged_attention(*inputs, on_host, SCALE)
        result.zero_()
        replay()
        bench.finish()
        verdict = max(verdict, compare([result.cpu()], [wanted], is_attention=True))
    return verdict


def _captured(capture: Capture, work: Replay, agree: Agree) -> Replay:
    try:
        replay = capture(work)
    except CaptureRefused:
        agree(False)
        raise
    if not agree(True):
        raise CaptureRefused("another rank's device refused to capture it")
    return replay


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
    """A sum as large as the largest step's: of whole numbers, which are exact in any order, then of others, whose order
    may differ between runs and should not between ranks."""
    shape = bench.sizes.step_tokens, bench.sizes.width
    rank, drawn = dist.get_rank(group), bench.normal(*shape)
    whole = torch.full(shape, float(rank + 1)).bfloat16().to(bench.device)
    summed = (drawn * (rank + 1) / 3).to(bench.device)
    for x in (whole, summed):
        dist.all_reduce(x, group=group)
    everyones = summed.new_empty(size * shape[0], shape[1])
    dist.all_gather_into_tensor(everyones, summed, group=group)
    bench.finish()
    told = f"{shape[0]} tokens by {algorithm_of_sums() or f'an algorithm that {LOG_LEVEL} would log'}"
    wanted, found = size * (size + 1) / 2, whole.cpu()
    if not bool((found == wanted).all()):
        return Verdict(Grade.WRONG, f"the sum over {size} ranks is {float(found.flatten()[0])}, not {wanted}; {told}")
    of_ranks = everyones.cpu().view(size, *shape)
    if not bool((of_ranks == of_ranks[0]).all()):
        return Verdict(Grade.ROUNDS_DIFFERENTLY, f"ranks round the same sum differently; {told}")
    return Verdict(Grade.SAME, f"equal on all ranks; {told}")


# Checks that a graph.mode adds.
GRAPH_CHECKS: dict[str, tuple[str, Callable[[Bench], Verdict]]] = {
    "npugraph": ("a replay of paged_attention", replayed_attention),
    "npugraph_ex": ("a replay of paged_attention", replayed_attention),
    "torchair": ("paged_attention in a GE graph", lowered_attention),
}


def algorithm_of_sums() -> str | None:
    """Return the algorithm of this process's last all-reduce, as SelectAlgfor91093 logs it; None where the log has no
    such line."""
    folder = Path(os.environ.get("ASCEND_PROCESS_LOG_PATH") or Path.home() / "ascend" / "log")
    files = sorted(folder.glob(f"*/plog/plog-{os.getpid()}_*.log"))
    chosen = [name for path in files for name in _CHOICE.findall(path.read_text(encoding="utf-8", errors="replace"))]
    return chosen[-1] if chosen else None
