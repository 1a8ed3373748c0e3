"""One forward pass over this rank's tokens, as it is or captured: layers at one padded shape, head at another.

fill buffers -> one copy to the device -> layers -> hidden states that are read -> head, statistics, gather over bp ->
host. `launch` only queues work; `wait` is the one place where the host waits for the device, for a few KB in pinned
memory. What the host can do in between is up to the engine.

Branch ranks may run the layers at different shapes, since those hold collectives of their own tp group only; the head
holds the gather over bp, so its shape and whether it is captured follow from what all ranks know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from common.decoding import PredictionOrder, Sampling, StepPlan
from common.model import Decoder
from common.runtime import PassTimes, Stopwatch
from graphs.runner import Entry, GraphRunner, Replay, capture_costs
from lopa_ascend.kv import PageBook, PagedKVCache, pages_for
from lopa_ascend.ops import VirtualRows
from lopa_ascend.parallel import Collectives
from lopa_ascend.passes.buffers import ReadBuffers, Sizes, StepBuffers
from lopa_ascend.passes.halves import Head, Layers, SampledHead
from lopa_ascend.passes.patience import Patience
from lopa_ascend.passes.shapes import Shapes
from lopa_ascend.passes.step import FlatStep, Reads, filler, pad
from lopa_ascend.passes.timing import LengthsCapture, UpdatedReplay, gather_ms, length_updates_ms
from lopa_ascend.stages import RotaryTable


@dataclass(frozen=True, slots=True)
class LayersKey:
    sizes: Sizes
    is_captured: bool


@dataclass(frozen=True, slots=True)
class HeadKey:
    num_reads: int
    sampling: Sampling
    is_captured: bool


KeyT = TypeVar("KeyT", LayersKey, HeadKey)
BuffersT = TypeVar("BuffersT", StepBuffers, ReadBuffers)
Compile = Callable[[nn.Module, str], Callable[..., Tensor]]


def as_it_is(half: nn.Module, name: str) -> Callable[..., Tensor]:
    return half


@dataclass(frozen=True, slots=True)
class Graphs:
    """How steps are captured. compile_layers, compile_head: a half's forward as a shape, known by this name, shall run
    it. rows: the virtual rows of a captured step as its layers take them."""

    shapes: Shapes
    capture: LengthsCapture
    compile_layers: Compile = as_it_is
    compile_head: Compile = as_it_is
    rows: Callable[[VirtualRows], VirtualRows] = lambda rows: rows


class Forward:
    """The model on its pages. Without `graphs` every pass runs at its own shape."""

    def __init__(
        self, model: Decoder, rotary: RotaryTable, cache: PagedKVCache, book: PageBook, collectives: Collectives,
        device: torch.device, max_model_len: int, patience: Patience, graphs: Graphs | None = None,
    ) -> None:  # fmt: skip
        self.device = device
        self._model = model
        self._layers = Layers(model, rotary, cache)
        self._compiled: dict[LayersKey | HeadKey, Callable[..., Tensor]] = {}
        self._cache = cache
        self._book = book
        self._collectives = collectives
        self._max_model_len = max_model_len
        self._patience = patience
        self._graphs = graphs
        capture = graphs.capture if graphs else None
        most = (graphs.shapes.most_layers, graphs.shapes.most_heads) if graphs else (None, None)
        self.layers = GraphRunner("layers", self._step_buffers, self._run_layers, capture, most[0])
        self.head = GraphRunner("head", self._read_buffers, self._run_head, capture, most[1])
        self._width, self._dtype = model.norm.weight.shape[0], model.norm.weight.dtype
        tokens = graphs.shapes.most_tokens if graphs else 0
        largest = Sizes(tokens, graphs.shapes.most_rows if graphs else 0, pages_for(max_model_len), tokens)
        self._captured_buffers = StepBuffers(largest, device)
        self._captured_hidden_TD = torch.zeros((tokens, self._width), dtype=self._dtype, device=device)
        self._hidden_TD = self._captured_hidden_TD
        self._rows = VirtualRows(torch.zeros(0), [], [])
        self._run: Replay | None = None  # of the last launch's layers
        self._received: ReadBuffers | None = None
        self._done = torch.Event(device) if device.type != "cpu" else None
        self.num_tokens = 0
        self.busy = Stopwatch()
        self.times = PassTimes(None if device.type == "cpu" else lambda: torch.npu.Event(enable_timing=True))

    def launch(self, plan: StepPlan, flat: FlatStep, reads: Reads) -> PredictionOrder:
        """Queue the pass; where its predictions belong."""
        head_key = self.head_key(reads.most, plan.sampling)
        head = self._entry(self.head, head_key)
        key = self.layers_key(flat, head_key.num_reads)
        self.num_tokens = key.sizes.num_tokens
        layers = self._entry(self.layers, key)
        if key.is_captured:
            flat = pad(flat, key.sizes.num_tokens, key.sizes.num_rows, self._book)
        self._set(flat, layers.buffers, key)
        self.times.mark(0)
        self.busy.start()
        layers.run()
        self._run = layers.run
        if key.is_captured:
            self.busy.start()  # the device begins once it has the whole graph
        self.times.mark(1)
        # A replay runs none of our code: what it leaves behind lies where it was captured.
        hidden_TD = self._captured_hidden_TD if key.is_captured else self._hidden_TD
        read_M = layers.buffers.reads(head_key.num_reads)
        torch.index_select(hidden_TD, 0, read_M, out=head.buffers.hidden_MD)
        if head_key.sampling.is_sampled:
            head.buffers.send(reads.sampling_fields(self._collectives.mesh.bp_rank, head_key.num_reads))
        head.run()
        head.buffers.receive()
        self.times.mark(2)
        self._received = head.buffers
        if self._done is not None:
            self._done.record()
        return reads.order(head_key.num_reads)

    def _entry(self, runner: GraphRunner[KeyT, BuffersT], key: KeyT) -> Entry[BuffersT]:
        if not key.is_captured or runner.has(key):
            return runner.entry(key, is_captured=key.is_captured)
        with self._patience.capturing():
            return runner.entry(key)

    def wait(self) -> np.ndarray:
        """[bp, M, 3] float32 of the last launch: token, probability, confidence."""
        self._patience.wait(self._done)
        self.busy.stop()
        assert self._received is not None, "wait follows launch"
        predicted: np.ndarray = self._received.host_PM3.numpy()
        return predicted

    def gather_ms(self, num_reads: int) -> float:
        """The gather over bp alone."""
        return gather_ms(self._collectives, num_reads, self.device)

    def length_updates_ms(self) -> dict[str, float]:
        """common.bench.steps.Measurable's; ranks of a tp group call it at the same time."""
        if self._graphs is None or not isinstance(self._run, UpdatedReplay):
            return {}
        return length_updates_ms(self._graphs.capture, self._run, self.device)

    def memory(self) -> dict[str, float]:
        """Peak bytes of this process on the device, and what capture cost."""
        peak = 0.0 if self.device.type == "cpu" else float(torch.npu.max_memory_allocated(self.device))
        return {"peak_bytes": peak, **capture_costs(self.layers, self.head)}

    def num_experts_hit(self, plan: StepPlan) -> float | None:
        """Not counted here."""
        return None

    def capture_layers(self, num_tokens: int, num_rows: int) -> None:
        """Ahead of the first step of this shape (a size of the graphs' shapes), if there is room for it."""
        key = self._captured_key(num_tokens, num_rows)
        if self.layers.has_room(key):
            self.layers.entry(key)

    def capture_head(self, num_reads: int, sampling: Sampling) -> None:
        key = self.head_key(num_reads, sampling)
        if key.is_captured:
            self.head.entry(key)

    def layers_key(self, flat: FlatStep, num_reads: int) -> LayersKey:
        num_tokens, (num_rows, num_pages) = flat.num_tokens, flat.table_VP.shape
        if self._graphs is not None and num_reads <= self._graphs.shapes.most_tokens:
            shape = self._graphs.shapes.shape(num_tokens, num_rows)
            if shape is not None and self.layers.has_room(self._captured_key(*shape)):
                return self._captured_key(*shape)
        return LayersKey(Sizes(num_tokens, num_rows, num_pages, num_reads), is_captured=False)

    def _captured_key(self, num_tokens: int, num_rows: int) -> LayersKey:
        return LayersKey(Sizes(num_tokens, num_rows, pages_for(self._max_model_len), 0), is_captured=True)

    def head_key(self, num_reads: int, sampling: Sampling) -> HeadKey:
        """The same on every rank."""
        padded = self._graphs.shapes.reads(num_reads) if self._graphs else None
        captured = HeadKey(padded or num_reads, sampling, is_captured=True)
        if padded is not None and self.head.has_room(captured):
            return captured
        return HeadKey(num_reads, sampling, is_captured=False)

    def _step_buffers(self, key: LayersKey) -> StepBuffers:
        if not key.is_captured:
            return StepBuffers(key.sizes, self.device)
        sizes = key.sizes
        flat = filler(sizes.num_tokens, sizes.num_rows, sizes.num_pages, self._max_model_len, self._book)
        self._set(flat, self._captured_buffers, key)
        return self._captured_buffers

    def _set(self, flat: FlatStep, buffers: StepBuffers, key: LayersKey) -> None:
        """What the coming pass computes: on the device, and in the attention's host lists."""
        buffers.fill(flat)
        buffers.send()
        rows = VirtualRows(buffers.step(key.sizes).table_VP, flat.query_ends, flat.kv_lengths)
        self._rows = rows
        if self._graphs is not None and key.is_captured:
            self._graphs.capture.lengths = self._model.ops.attention_lengths(rows)
            self._rows = self._graphs.rows(rows)

    def _read_buffers(self, key: HeadKey) -> ReadBuffers:
        num_ranks, is_sampled = self._collectives.mesh.bp_size, key.sampling.is_sampled
        return ReadBuffers(key.num_reads, num_ranks, self._width, self._dtype, self.device, is_sampled=is_sampled)

    def _run_layers(self, key: LayersKey, buffers: StepBuffers) -> None:
        hidden_TD = self._layers_of(key)(buffers.step(key.sizes), self._rows)
        if key.is_captured:
            self._captured_hidden_TD[: key.sizes.num_tokens].copy_(hidden_TD)
        else:
            self._hidden_TD = hidden_TD

    def _run_head(self, key: HeadKey, buffers: ReadBuffers) -> None:
        given = (buffers.hidden_MD,) if buffers.rows is None else (buffers.hidden_MD, buffers.rows)
        buffers.predicted_PM3.copy_(self._head_of(key)(*given))

    def _layers_of(self, key: LayersKey) -> Callable[..., Tensor]:
        if not key.is_captured:
            return self._layers
        if key not in self._compiled:
            assert self._graphs is not None, "only graphs capture"
            sizes, cache = key.sizes, self._cache
            name = (
                f"t{sizes.num_tokens}_v{sizes.num_rows}_p{sizes.num_pages}_of{cache.num_pages}_s{self._max_model_len}"
            )
            self._compiled[key] = self._graphs.compile_layers(self._layers, name)
        return self._compiled[key]

    def _head_of(self, key: HeadKey) -> Callable[..., Tensor]:
        if key not in self._compiled:
            kind = SampledHead if key.sampling.is_sampled else Head
            head = kind(self._model, self._collectives, key.sampling)
            name = f"m{key.num_reads}_{key.sampling.strategy}_mask{key.sampling.mask_token_id}"
            is_compiled = self._graphs is not None and key.is_captured and not key.sampling.is_sampled
            self._compiled[key] = self._graphs.compile_head(head, name) if self._graphs and is_compiled else head
        return self._compiled[key]
