"""The Ascend engine: a step (common.runtime.engine) over block-causal windows in paged KV.

fill buffers -> one copy to the device -> layers -> hidden states that are read -> head, statistics, gather over bp ->
host. The copies to and from the host are in no graph. No KV moves when it is committed, neither on the device nor
between ranks: what a step's commits do to the pages does not depend on the winner, so the host works it out while the
device computes, and `commit` only puts the prepared pages in force.

Branch ranks may run the layers at different shapes, since those hold collectives of their own tp group only; the head
holds the gather over bp, so its shape and whether it is captured follow from what all ranks know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from common.decoding import Capacity, Int, Sampling, StepPlan, rows_by_rank
from common.errors import ConfigError
from common.model import Decoder
from common.runtime import Collectives, DeviceEngine, ReadsKey
from graphs.runner import Agree, Entry, GraphRunner
from lopa_ascend.floors import LengthsCapture, UpdatedReplay, length_updates_ms, measure_npu_floors, median_seconds
from lopa_ascend.kv import PageBook, PagedKVCache, pages_for
from lopa_ascend.ops import Ops, VirtualRows
from lopa_ascend.shapes import Shapes
from lopa_ascend.stages import RotaryTable
from lopa_ascend.steps import (
    FlatStep,
    LayersKey,
    Patience,
    ReadBuffers,
    Sizes,
    StepBuffers,
    filler,
    lay_out,
    most_reads,
    pad,
    read_entries,
)
from lopa_ascend.steps.halves import BestHead, Head, Layers, SampledHead

Compile = Callable[[nn.Module, str], Callable[..., Tensor]]


def as_it_is(half: nn.Module, name: str) -> Callable[..., Tensor]:
    return half


@dataclass(frozen=True, slots=True)
class Graphs:
    """How steps are captured. compile_layers, compile_head: compile a half's forward for one shape, known by a name.
    rows: turns a captured step's virtual rows into the form that its layers take."""

    shapes: Shapes
    capture: LengthsCapture
    compile_layers: Compile = as_it_is
    compile_head: Compile = as_it_is
    rows: Callable[[VirtualRows], VirtualRows] = lambda rows: rows


class AscendEngine(DeviceEngine):
    """Without `graphs` every pass runs at its own shape."""

    name = "lopa_ascend"
    clock = staticmethod(median_seconds)
    key: LayersKey
    cache: PagedKVCache
    kv: PageBook

    def __init__(
        self, model: Decoder, rotary: RotaryTable, cache: PagedKVCache, book: PageBook, capacity: Capacity,
        collectives: Collectives, device: torch.device, patience: Patience, ops: Ops, details: dict[str, Any],
        graphs: Graphs | None = None, agree: tuple[Agree, Agree] = (bool, bool),
    ) -> None:  # fmt: skip
        capture, most = None, (None, None)
        if graphs:
            capture, most = graphs.capture, (graphs.shapes.most_layers, graphs.shapes.most_heads)
        super().__init__(
            model, cache, book, capacity, collectives, device, capture, patience.wait, details, most, agree
        )  # fmt: skip
        self._ops = ops
        self._layers = Layers(model, rotary, cache)
        self._compiled: dict[LayersKey | ReadsKey, Callable[..., Tensor]] = {}
        self._patience = patience
        self._graphs = graphs
        self._width, self._dtype = model.norm.weight.shape[0], model.norm.weight.dtype
        tokens = graphs.shapes.most_tokens if graphs else 0
        largest = Sizes(tokens, graphs.shapes.most_rows if graphs else 0, pages_for(capacity.max_model_len), tokens)
        self._captured_buffers = StepBuffers(largest, device)
        self._captured_hidden_TD = torch.zeros((tokens, self._width), dtype=self._dtype, device=device)
        self._hidden_TD = self._captured_hidden_TD
        self._rows = VirtualRows(torch.zeros(0), [], [])
        self._rows_of: Sequence[Int] = ()  # each rank's rows in the last launch
        self._launched: Entry[StepBuffers] | None = None

    def forget_captures(self) -> None:
        super().forget_captures()
        self._compiled.clear()
        self._launched = None
        if hasattr(self, "_head"):
            del self._head

    def measure_floors(self) -> dict[str, float]:
        return measure_npu_floors(self._ops, self.device, self.cache.dtype)

    def length_updates_ms(self) -> dict[str, float]:
        """Ranks of a tp group call it at the same time."""
        run = self._launched.run if self._launched else None
        if self._graphs is None or not isinstance(run, UpdatedReplay):
            return {}
        return length_updates_ms(self._graphs.capture, run, self.device)

    def layers_key(self, flat: FlatStep, num_reads: int) -> LayersKey:
        num_tokens, (num_rows, num_pages) = flat.num_tokens, flat.table_VP.shape
        if self._graphs is not None and num_reads <= self._graphs.shapes.most_tokens:
            shape = self._graphs.shapes.shape(num_tokens, num_rows)
            if shape is not None and self.layers.has_room(self.captured_key(*shape)):
                return self.captured_key(*shape)
        return LayersKey(Sizes(num_tokens, num_rows, num_pages, num_reads), is_captured=False)

    def captured_key(self, num_tokens: int, num_rows: int) -> LayersKey:
        """The key of a size of the graphs' shapes."""
        return LayersKey(Sizes(num_tokens, num_rows, pages_for(self.capacity.max_model_len), 0), is_captured=True)

    def reads_key(self, num_reads: int, sampling: Sampling) -> ReadsKey:
        """The head's shape, which is the same on every rank."""
        padded = self._graphs.shapes.reads(num_reads) if self._graphs else None
        captured = ReadsKey(padded or num_reads, sampling, is_captured=True)
        if padded is not None and self.head.has_room(captured):
            return captured
        return ReadsKey(num_reads, sampling, is_captured=False)

    def _new_event(self, *, is_timed: bool) -> Any:
        return torch.npu.Event(enable_timing=True) if is_timed else torch.Event(self.device)

    def _lay_out(self, plan: StepPlan) -> Entry[StepBuffers]:
        """Finds the head's shape first: which states are read goes to the device together with the rows."""
        if not plan.commits_locally:
            raise ConfigError("engine lopa_ascend: set decode.window_attention to block_causal")
        self._rows_of = rows_by_rank(plan, self._bp_size)
        flat = lay_out(plan, self._rows_of[self._bp_rank], self.kv)
        self.cache.copy_pages(flat.copies)
        self._reads_key = self.reads_key(most_reads(plan, self._rows_of), plan.sampling)
        self._head = self._entry(self.head, self._reads_key)
        self.key = key = self.layers_key(flat, self._reads_key.num_reads)
        self._launched = layers = self._entry(self.layers, key)
        if key.is_captured:
            flat = pad(flat, key.num_tokens, key.sizes.num_rows, self.kv)
        self._set(flat, layers.buffers, key)
        return layers

    def _launch_head(self, plan: StepPlan) -> tuple[Sequence[Int], npt.NDArray[np.float32]]:
        # A replay runs none of our code: what it leaves lies where it was captured.
        hidden_TD = self._captured_hidden_TD if self.key.is_captured else self._hidden_TD
        buffers = self._head.buffers
        read_M = self._launched.buffers.reads(self._reads_key.num_reads)
        torch.index_select(hidden_TD, 0, read_M, out=buffers.hidden_MD)
        entries_of = read_entries(plan, self._rows_of)
        buffers.send_sampling(plan, entries_of[self._bp_rank])
        self._head.run()
        buffers.receive(buffers.gathered_PM3)
        return entries_of, buffers.predicted_PM3

    @torch.no_grad()
    def _logits_of(self, plan: StepPlan, place_M: Int) -> Tensor:
        hidden_MD = self._head.buffers.hidden_MD
        hidden_MD = hidden_MD.index_select(0, torch.from_numpy(place_M).to(self.device))
        return self.model.ops.linear(hidden_MD, self.model.lm_head)

    def _prepare_commits(self, plan: StepPlan) -> None:
        self.kv.prepare_commits(plan)

    def _entry(self, runner: GraphRunner[Any, Any], key: LayersKey | ReadsKey) -> Entry[Any]:
        if not key.is_captured or runner.has(key):
            return runner.entry(key, is_captured=key.is_captured)
        with self._patience.capturing():
            return runner.entry(key)

    def _step_buffers(self, key: LayersKey) -> StepBuffers:
        if not key.is_captured:
            return StepBuffers(key.sizes, self.device)
        sizes = key.sizes
        flat = filler(sizes.num_tokens, sizes.num_rows, sizes.num_pages, self.capacity.max_model_len, self.kv)
        self._set(flat, self._captured_buffers, key)
        return self._captured_buffers

    def _set(self, flat: FlatStep, buffers: StepBuffers, key: LayersKey) -> None:
        """Set what the coming pass computes, on the device and in the attention's host lists."""
        buffers.fill(flat)
        buffers.send()
        rows = VirtualRows(buffers.step(key.sizes).table_VP, flat.query_ends, flat.kv_lengths)
        self._rows = rows
        if self._graphs is not None and key.is_captured:
            self._graphs.capture.lengths = self.model.ops.attention_lengths(rows)
            self._rows = self._graphs.rows(rows)

    @torch.no_grad()
    def _run_layers(self, key: LayersKey, buffers: StepBuffers) -> None:
        hidden_TD = self._layers_of(key)(buffers.step(key.sizes), self._rows)
        if key.is_captured:
            self._captured_hidden_TD[: key.num_tokens].copy_(hidden_TD)
        else:
            self._hidden_TD = hidden_TD

    def _read_buffers(self, key: ReadsKey) -> ReadBuffers:
        return ReadBuffers(key, self.device, self._bp_size, self._width, self._dtype)

    @torch.no_grad()
    def _run_head(self, key: ReadsKey, buffers: ReadBuffers) -> None:
        head = self._head_of(key)
        rows = () if buffers.sampling_rows is None else (buffers.sampling_rows,)
        buffers.gathered_PM3.copy_(head(buffers.hidden_MD, *rows))

    def _layers_of(self, key: LayersKey) -> Callable[..., Tensor]:
        if not key.is_captured:
            return self._layers
        if key not in self._compiled:
            assert self._graphs is not None, "only graphs capture"
            sizes, most_pages, longest = key.sizes, self.cache.num_pages, self.capacity.max_model_len
            name = f"t{sizes.num_tokens}_v{sizes.num_rows}_p{sizes.num_pages}_of{most_pages}_s{longest}"
            self._compiled[key] = self._graphs.compile_layers(self._layers, name)
        return self._compiled[key]

    def _head_of(self, key: ReadsKey) -> Callable[..., Tensor]:
        if key not in self._compiled:
            kind = BestHead if key.sampling.num_best else SampledHead if key.sampling.is_sampled else Head
            head = kind(self.model, self._collectives, key.sampling)
            name = f"m{key.num_reads}_{key.sampling.strategy}_mask{key.sampling.mask_token_id}"
            is_compiled = self._graphs is not None and key.is_captured and kind is Head
            self._compiled[key] = self._graphs.compile_head(head, name) if self._graphs and is_compiled else head
        return self._compiled[key]
