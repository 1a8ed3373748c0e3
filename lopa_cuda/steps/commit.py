"""Commit-Winner-Cache: copy each winner's staged KV to the pages of its request, on every rank.

A rank that computed the winner (or, under block-causal attention, any row of the request) copies its own, and so does
every rank after a pass that was cut (lopa_cuda.steps.slices). Where some rank did not, the winner's owner broadcasts:
all layers of all its spans in one contiguous buffer. Commits are captured ahead for a few lengths: the host then writes
two lists of positions and launches once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.decoding import CommitSpan, Int, StepPlan
from common.runtime import Collectives, PrefixCache, Upload
from graphs.buckets import fit
from graphs.runner import Capture, GraphRunner
from lopa_cuda.steps.kv_cache import PagedKVCache
from lopa_cuda.steps.share import Share


class Staged(NamedTuple):
    """Where a forward pass left the windows of its rows. row_of [bp rank, place]: rows of the plan. shares: where they
    begin. is_whole: every rank has all rows, in the plan's order."""

    row_of: Int
    shares: list[Share]
    staging: Tensor  # [L, 2, T, K, H]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class CommitKey:
    """owner: the branch rank that broadcasts; None where every rank has the KV itself."""

    length: int
    owner: int | None
    is_captured: bool


class CommitBuffers:
    """Which tokens of the staging memory are copied to which positions of the cache, counted through all pages."""

    def __init__(self, key: CommitKey, device: torch.device) -> None:
        self._upload = Upload((2, key.length), device, torch.int64)
        self.token_N, self.position_N = self._upload.device.unbind()

    def fill(self, tokens: list[int], positions: list[Int]) -> None:
        """Take the first token and all positions of each span."""
        begin = 0
        for token, position_N in zip(tokens, positions, strict=True):
            entries = self._upload.host[:, begin : begin + len(position_N)]
            entries[0] = np.arange(token, token + len(position_N))
            entries[1] = position_N
            begin += len(position_N)
        self._upload.host[:, begin:] = self._upload.host[:, begin - 1 : begin]  # padding copies the last once more

    def send(self) -> None:
        self._upload.send()


class Committer:
    """Makes spans final on this rank; every rank of the bp axis calls it alike.

    staged: where the last pass left its rows.
    """

    staged: Staged

    def __init__(self, cache: PagedKVCache, collectives: Collectives, capture: Capture | None) -> None:
        self.runner = GraphRunner("commit", self._buffers, self._run, capture)
        self._cache = cache
        self._collectives = collectives
        self._rank = collectives.mesh.bp_rank
        self._staging = cache.captured_staging
        self._captured_lengths: tuple[int, ...] = ()

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        if not plan.commits:
            return
        staged = self.staged
        if staged.is_whole:
            request_N = [span.request for span in plan.commits]
            token_N = plan.first_R[winner_row_of_request[request_N]].tolist()
            self._copy(staged.staging, None, list(zip(plan.commits, token_N, strict=True)))
            return
        spans_of: dict[int | None, list[tuple[CommitSpan, int]]] = defaultdict(list)
        for span in plan.commits:
            owner, token = self._source(plan, span, int(winner_row_of_request[span.request]), staged)
            spans_of[owner].append((span, token))
        for owner, spans in spans_of.items():
            self._copy(staged.staging, owner, spans)

    @property
    def prefixes(self) -> PrefixCache:
        return self._cache.prefixes

    @property
    def bytes_per_position(self) -> int:
        """Scratch memory that a captured commit keeps for each position."""
        return self._cache.bytes_per_position

    def warm_up(self, lengths: list[int]) -> None:
        """Capture these commits, from every owner there may be. Collective over bp."""
        owners = (None,) if self._collectives.mesh.bp_group is None else (None, *range(self._collectives.mesh.bp_size))
        for length in sorted(lengths, reverse=True):  # graphs share one pool of scratch memory
            for owner in owners:
                self.runner.entry(CommitKey(length, owner, is_captured=True))
        self._cache.committed.zero_()  # what captures have copied is no prompt's, and may be no number
        # Not later: what runs before a capture would write to the cache, where by then a request may be.
        self._captured_lengths = tuple(sorted(lengths))

    def _source(self, plan: StepPlan, span: CommitSpan, winner: int, staged: Staged) -> tuple[int | None, int]:
        """(owner, first token) of the row to copy from; owner None if every rank has such a row, each its own."""
        row_of = staged.row_of
        is_source = plan.request_R[row_of] == span.request if plan.commits_locally else row_of == winner
        if is_source.any(axis=1).all():
            return None, staged.shares[self._rank].first_token(int(is_source[self._rank].argmax()))
        owner, place = divmod(int((row_of == winner).argmax()), row_of.shape[1])
        return owner, staged.shares[owner].first_token(place)

    def _copy(self, staging: Tensor, owner: int | None, spans: list[tuple[CommitSpan, int]]) -> None:
        length = sum(span.length for span, _ in spans)
        padded = fit(length, self._captured_lengths) if staging is self._cache.captured_staging else None
        is_captured = padded is not None
        entry = self.runner.entry(CommitKey(padded or length, owner, is_captured), is_captured=is_captured)
        entry.buffers.fill([token for _, token in spans], [self._cache.positions(span) for span, _ in spans])
        self._staging = staging
        entry.run()

    def _buffers(self, key: CommitKey) -> CommitBuffers:
        return CommitBuffers(key, self._cache.committed.device)

    @torch.inference_mode()
    def _run(self, key: CommitKey, buffers: CommitBuffers) -> None:
        buffers.send()
        window = self._cache.captured_staging if key.is_captured else self._staging
        # Whoever is not the owner reads something of the same size, which the broadcast overwrites.
        span_LNX = _as_words(window.flatten(0, 1)).index_select(1, buffers.token_N)
        if key.owner is not None:
            self._collectives.bp_broadcast(span_LNX, key.owner)
        _as_words(self._cache.committed.flatten(0, 1).flatten(1, 2)).index_copy_(1, buffers.position_N, span_LNX)


def _as_words(x_LNKH: Tensor) -> Tensor:
    """[L, N, K, H] as [L, N, X] of 8-byte words: copies move a word a time."""
    return x_LNKH.flatten(2).view(torch.int64)
