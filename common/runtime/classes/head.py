"""The statistics of a pass's classes, for requests whose answers are held to a format: from the logits of these
requests' rows, in no graph, after the head, 64 positions at a time. Passes without such requests do nothing here.

Shapes: N positions, V the shard's vocabulary, C classes, X entries, P branch ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from common.constraints import Automaton, Recent
from common.decoding import ClassField, ClassStatistics, Int, Sampling, StepPlan
from common.model import SamplingRows
from common.runtime.classes.tiles import Tiles, merge_classes
from common.runtime.collectives import Collectives
from common.runtime.logprobs import Float, Shares
from common.runtime.reads import drawn_fields

_AT_ONCE = 64  # positions
_NOTHING = np.empty((0, 0, 0), np.float32)


class Reduce(Protocol):
    """`class_statistics`, or a device's own version of it."""

    def __call__(
        self, logits_NV: Tensor, vocab_start: int, tiles: Tiles, sampling: Sampling, rows: SamplingRows | None
    ) -> Tensor: ...


class _Asked(NamedTuple):
    """An automaton's part of a pass. told_PNX: host memory in which the statistics of each branch rank's share of the
    entries come; empty where nothing is read, as in a pass over a part of a prompt."""

    automaton: Automaton
    entry_X: Int
    told_PNX: Float
    in_order: Callable[[Float], Float]


class ClassHead:
    """Computes the statistics of a pass: queue them by `launch`, then read them by `receive`."""

    def __init__(self, collectives: Collectives, device: torch.device, vocab_start: int, reduce: Reduce) -> None:
        self._collectives = collectives
        self._device = device
        self._vocab_start = vocab_start
        self._reduce = reduce
        self._tiles: Recent[str, Tiles] = Recent()
        self._asked: list[_Asked] = []

    @property
    def is_under_way(self) -> bool:
        return bool(self._asked)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, entries_of: Sequence[Int], logits_of: Callable[[Int], Tensor]) -> None:
        """Queue the statistics of what the plan holds to formats.

        entries_of: the plan's entries that each branch rank reads. logits_of: returns this rank's shard of the logits
        of reads, by their places among its own.
        """
        self._asked = []
        held, request_T = plan.automaton_of or {}, plan.request_R.repeat(plan.num_entries_R)
        rank = self._collectives.mesh.bp_rank
        for automaton in {automaton.key: automaton for automaton in held.values()}.values():
            requests = [request for request, other in held.items() if other.key == automaton.key]
            entry_X = (np.isin(request_T, requests) & plan.is_read_T).nonzero()[0]
            if not len(entry_X):
                self._asked.append(_Asked(automaton, entry_X, _NOTHING, np.asarray))
            else:
                shares = Shares(plan.num_tokens, entries_of, entry_X, rank)
                found_NC5 = self._computed(plan, automaton, shares.place_M, entry_X[shares.index_M], logits_of)
                statistics_PNX = self._collectives.bp_stack(found_NC5).flatten(2)
                host = torch.empty(statistics_PNX.shape, pin_memory=self._device.type != "cpu")
                host.copy_(statistics_PNX, non_blocking=True)
                self._asked.append(_Asked(automaton, entry_X, host.numpy(), shares.in_order))

    def receive(self) -> Mapping[str, ClassStatistics]:
        """Return the statistics of the pass launched last, once the device has come past it."""
        asked, self._asked = self._asked, []
        return {
            automaton.key: ClassStatistics(
                entry_X, in_order(told_PNX).reshape(len(entry_X), automaton.num_classes, len(ClassField))
            )
            for automaton, entry_X, told_PNX, in_order in asked
        }

    def _computed(
        self, plan: StepPlan, automaton: Automaton, place_N: Int, entry_N: Int, logits_of: Callable[[Int], Tensor]
    ) -> Tensor:
        """[N, C, 5] of this rank's reads, merged over the shards."""
        found = []
        for begin in range(0, len(place_N), _AT_ONCE):
            own = slice(begin, begin + _AT_ONCE)
            logits_NV = logits_of(place_N[own])
            tiles = self._tiles_of(automaton, logits_NV.shape[1])
            rows = self._sampling_rows(plan, entry_N[own])
            statistics_NC6 = self._reduce(logits_NV, self._vocab_start, tiles, plan.sampling, rows)
            found.append(merge_classes(self._collectives.tp_stack(statistics_NC6), rows))
        return torch.cat(found)

    def _tiles_of(self, automaton: Automaton, num_columns: int) -> Tiles:
        tiles = self._tiles.get(automaton.key)
        if tiles is None:
            class_V = np.zeros(num_columns, np.int64)  # padding has no part in any text
            own_V = automaton.class_V[self._vocab_start : self._vocab_start + num_columns]
            class_V[: len(own_V)] = own_V
            tiles = Tiles.of(class_V, automaton.num_classes, self._device)
            self._tiles.keep(automaton.key, tiles, num_bytes=0)  # of a vocabulary's length: their number bounds them
        return tiles

    def _sampling_rows(self, plan: StepPlan, entry_N: Int) -> SamplingRows | None:
        if plan.sampling_3R is None:
            return None
        fields_6N = drawn_fields(plan, entry_N, len(entry_N))
        return SamplingRows.of(torch.from_numpy(fields_6N).to(self._device))
