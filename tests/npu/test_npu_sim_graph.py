"""NPU graphs on the simulated device: what is frozen, what is refreshed, and what would hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from graphs.npu import NpuCapture
from graphs.runner import CaptureRefused
from lopa_ascend.ops import AttentionForm, AttentionVersion, VirtualRows, npu_ops

pytestmark = [pytest.mark.sim, pytest.mark.usefixtures("npu")]

LENGTHS = ([4, 8], [130, 200])
OTHER_LENGTHS = [([4, 8], [131, 201]), ([2, 8], [10, 300])]


class Attention:
    """Eight queries in two virtual rows over three pages each."""

    def __init__(self, version: AttentionVersion) -> None:
        draw = torch.Generator().manual_seed(5)
        self.ops = npu_ops(AttentionForm(version))
        self.query = torch.randn(8, 7, 128, generator=draw).bfloat16().npu()
        self.caches = [torch.randn(6, 128, 1, 128, generator=draw).bfloat16().npu() for _ in "kv"]
        self.table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32).npu()

    def rows(self, lengths: tuple[list[int], list[int]]) -> VirtualRows:
        return VirtualRows(self.table, *lengths)

    def __call__(self, lengths: tuple[list[int], list[int]]) -> Tensor:
        return self.ops.paged_attention(self.query, *self.caches, self.rows(lengths), 0.1)


def capture(work: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        result = work()
    return graph, result


def test_capture_records_and_replay_computes() -> None:
    x, cache = torch.ones(4, device="npu"), torch.zeros(4, device="npu")

    def work() -> Tensor:
        doubled = x * 2 + 1
        cache.add_(doubled)
        return doubled.view(2, 2).sum(0)

    graph, total = capture(work)
    assert cache.tolist() == [0, 0, 0, 0]
    assert bool(total.cpu().isnan().all()), "results are undefined before the first replay"
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert total.tolist() == [4 * value + 2] * 2
    assert cache.tolist() == [18.0] * 4


@pytest.mark.parametrize("version", [1, 2])
def test_a_capture_freezes_the_lengths(version: AttentionVersion) -> None:
    attention = Attention(version)
    graph, out = capture(lambda: attention(LENGTHS))
    graph.replay()
    assert torch.equal(out.cpu(), attention(LENGTHS).cpu())


@pytest.mark.parametrize("version", [1, 2])
def test_an_update_refreshes_the_lengths_of_every_attention_call(version: AttentionVersion) -> None:
    attention = Attention(version)
    graph, outs = capture(lambda: [attention(LENGTHS).float() * 2, attention(LENGTHS)], auto_dispatch_capture=True)
    for lengths in OTHER_LENGTHS:
        graph.update(cpu_update_input=[attention.ops.attention_lengths(attention.rows(lengths))])
        graph.replay()
        wanted = attention(lengths)
        assert torch.equal(outs[0].cpu(), wanted.float().cpu() * 2)
        assert torch.equal(outs[1].cpu(), wanted.cpu())


def test_a_replay_without_its_update_would_hang() -> None:
    attention = Attention(2)
    graph, _ = capture(lambda: attention(LENGTHS), auto_dispatch_capture=True)
    graph.update(cpu_update_input=[attention.ops.attention_lengths(attention.rows(LENGTHS))])
    graph.replay()
    graph.replay()
    with pytest.raises(RuntimeError, match="a device would hang"):
        attention.query.add(1)
    graph.update(cpu_update_input=[attention.ops.attention_lengths(attention.rows(LENGTHS))])
    attention.query.add(1)


def test_an_update_that_changes_the_number_of_rows_needs_another_graph() -> None:
    attention = Attention(2)
    graph, _ = capture(lambda: attention(LENGTHS), auto_dispatch_capture=True)
    update = {"actual_seq_qlen": [8], "actual_seq_kvlen": [9]}
    graph.update(cpu_update_input=[update])
    with pytest.raises(ValueError, match="block_table is int32 with 1 rows"):
        graph.replay()


@pytest.mark.parametrize(
    "work",
    [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: torch.ones(3).npu(), lambda x: x.copy_(torch.ones(3))],
    ids=["item", "to host", "to device", "copy from host"],
)
def test_what_cannot_be_captured_is_refused(work: Callable[[Tensor], Any]) -> None:
    x = torch.ones(3, device="npu")
    with pytest.raises(RuntimeError, match="not capturable"):
        capture(lambda: work(x))


def test_a_graph_is_captured_before_it_is_replayed() -> None:
    with pytest.raises(RuntimeError, match="not captured"):
        torch.npu.NPUGraph().replay()


@pytest.mark.parametrize("updates", ["after", "before"])
def test_lengths_are_written_after_the_launch_or_before_it(npu: Any, updates: Literal["after", "before"]) -> None:
    """With `after`, what lies before the attention has run when the writing begins, and the replay waits for its event;
    two attentions are written one by one, and the first has run before the second is."""
    attention, capture = Attention("v1"), NpuCapture(updates)
    total = torch.zeros(8, 7, 128, device="npu").bfloat16()

    def work() -> None:
        total.copy_(attention(LENGTHS) * 2 + attention(LENGTHS))

    capture.lengths = attention.ops.attention_lengths(attention.rows(LENGTHS))
    replay, seen = capture(work), []
    graph = replay._graph
    update, record = graph.update, torch.npu.ExternalEvent.record

    def noted(**given: Any) -> None:
        seen.append(("update", npu.graphs.waiting is not None))
        update(**given)

    def recorded(event: Any, stream: Any) -> None:
        record(event, stream)
        seen.append(("attentions", sum(call.op.endswith("attention_score.out") for call in npu.stream)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "update", noted)
        patch.setattr(torch.npu.ExternalEvent, "record", recorded)
        for lengths in OTHER_LENGTHS:
            capture.lengths = attention.ops.attention_lengths(attention.rows(lengths))
            npu.stream.clear()
            seen.clear()
            replay()
            is_after = updates == "after"
            assert seen == [("update", is_after), ("attentions", int(is_after)), ("attentions", 2 * is_after)]
            assert npu.graphs.waiting is None
            assert torch.equal(total, attention(lengths) * 2 + attention(lengths))
            npu.stream.clear()
            seen.clear()
            replay()  # the same lengths: nothing is written, the events are recorded on the same side of the launch
            assert seen == [("attentions", int(is_after)), ("attentions", 2 * is_after)]
            assert npu.graphs.waiting is None and torch.equal(total, attention(lengths) * 2 + attention(lengths))


def test_a_replay_that_waits_for_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ASCEND_LAUNCH_BLOCKING would do with lengths written after a launch; lopa_ascend.variables refuses it."""
    attention, capturing = Attention("v1"), NpuCapture("after")
    total = torch.zeros(8, 7, 128, device="npu").bfloat16()
    capturing.lengths = attention.ops.attention_lengths(attention.rows(LENGTHS))
    replay = capturing(lambda: total.copy_(attention(LENGTHS)))
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    with pytest.raises(RuntimeError, match="ASCEND_LAUNCH_BLOCKING: replay\\(\\) waits for the device"):
        replay()


def test_an_event_that_nothing_has_waited_for_is_not_recorded_again() -> None:
    event = torch.npu.ExternalEvent()
    event.record(torch.npu.current_stream())
    with pytest.raises(RuntimeError, match="recorded again before a replay has waited for it"):
        event.record(torch.npu.current_stream())


NO_SQ_CQ = """capture_begin:build/compiler_depend.ts:214 NPU function error: AclmdlRICaptureBegin, error code is 207005
[Error]: Failed to apply for memory.
EE9999: Inner Error!
EE9999[PID: 1802934] 2026-04-17-09:16:39.992.922 (EE9999):  [SqCqManage]Alloc sq cq fail, stream_id=1984"""
NO_STREAM, NO_EVENT = "error code 207008", "NPU function error: aclrtCreateEventWithFlag, error code is 207007"
OLD_DRIVER = "a driver of HDK 25.5.1 or later has more room"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NO_STREAM, NO_STREAM),
        (NO_EVENT, NO_EVENT),
        (NO_SQ_CQ, f"EE9999: [SqCqManage]Alloc sq cq fail, stream_id=1984 ({NO_SQ_CQ.splitlines()[0]}); {OLD_DRIVER}"),
    ],
    ids=["stream", "event", "sq cq"],
)
def test_a_capture_after_a_refused_first_one_has_a_pool_and_nothing_of_the_other(
    monkeypatch: pytest.MonkeyPatch, error: str, told: str
) -> None:
    """A pool ends with its only graph, and torch_npu leaves a capture whose end raises half entered."""
    capture, x, stream = NpuCapture(), torch.ones(4, device="npu"), torch.npu.current_stream()
    total = torch.zeros(4, device="npu")
    ends = torch.npu.NPUGraph.capture_end

    def refuses(graph: Any) -> None:
        ends(graph)
        raise RuntimeError(error)

    with monkeypatch.context() as patch:
        patch.setattr(torch.npu.NPUGraph, "capture_end", refuses)
        with pytest.raises(CaptureRefused) as refused:
            capture(lambda: total.copy_(x * 2))
    assert str(refused.value) == told
    assert torch.npu.current_stream() == stream
    assert (x + 1).tolist() == [2.0] * 4, "operators run, and are not recorded"
    for _ in range(2):  # the second time after the only graph has been dropped
        replay = capture(lambda: total.copy_(x * 2))
        replay()
        assert total.tolist() == [2.0] * 4
        del replay
