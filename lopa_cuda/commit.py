"""Commit-Winner-Cache: copy each winner's window KV behind its request's committed prefix, on every rank.

A rank that computed the winner (or, under block-causal attention, any row of the request) copies its own window. Where
some rank did not, the winner's owner broadcasts: all layers of all its spans in one contiguous buffer.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.plan import CommitSpan, Int, StepPlan
from lopa_cuda.kv_cache import StaticKVCache
from lopa_cuda.parallel import Collectives


@dataclass(frozen=True, slots=True)
class WindowPart:
    """Where a forward pass left the windows of some rows: row_of [bp rank, place] names rows of the plan."""

    row_of: Int
    width: int
    window: Tensor  # [L, 2, T, K, H]

    def span(self, place: int, length: int) -> Tensor:
        return self.window.narrow(2, place * self.width, length)


class Committer:
    """Makes spans final on this rank; every rank of the bp axis calls it alike."""

    def __init__(self, cache: StaticKVCache, collectives: Collectives) -> None:
        self._cache = cache
        self._collectives = collectives
        self._rank = collectives.mesh.bp_rank
        self._staging = cache.committed.new_empty(0)

    def commit(self, plan: StepPlan, winner_row_of_request: Int, parts: list[WindowPart]) -> None:
        from_owner: dict[int, list[tuple[CommitSpan, WindowPart, int]]] = defaultdict(list)
        for span in plan.commits:
            winner = int(winner_row_of_request[span.request])
            part = next(part for part in parts if (part.row_of == winner).any())
            place = self._own_place(plan, span, winner, part)
            if place is not None:
                self._cache.commit(span.slot, span.start, part.span(place, span.length))
            else:
                owner, place = np.argwhere(part.row_of == winner)[0].tolist()
                from_owner[owner].append((span, part, place))
        for owner, spans in sorted(from_owner.items()):
            self._broadcast(owner, spans)

    def _own_place(self, plan: StepPlan, span: CommitSpan, winner: int, part: WindowPart) -> int | None:
        """This rank's row to copy from, if every rank has one."""
        row_of = part.row_of
        is_source = plan.request_R[row_of] == span.request if plan.is_block_causal else row_of == winner
        return int(is_source[self._rank].argmax()) if is_source.any(axis=1).all() else None

    def _broadcast(self, owner: int, spans: list[tuple[CommitSpan, WindowPart, int]]) -> None:
        lengths = [span.length for span, _, _ in spans]
        buffer = self._buffer(sum(lengths))
        pieces = buffer.split(lengths, dim=2)
        if owner == self._rank:
            for piece, (span, part, place) in zip(pieces, spans, strict=True):
                piece.copy_(part.span(place, span.length))
        self._collectives.bp_broadcast(buffer, owner)
        for piece, (span, _, _) in zip(pieces, spans, strict=True):
            self._cache.commit(span.slot, span.start, piece)

    def _buffer(self, length: int) -> Tensor:
        """A contiguous [L, 2, length, K, H] out of one staging block that grows when it must."""
        layers, two, _, _, heads, size = self._cache.committed.shape
        shape = layers, two, length, heads, size
        count = torch.Size(shape).numel()
        if self._staging.numel() < count:
            self._staging = self._cache.committed.new_empty(count)
        return self._staging[:count].view(shape)
