"""Rows of a decoding step over paged KV, laid out as the engine does it, beside the same attention written densely."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import plain
import torch
from torch import Tensor

from lopa_ascend.ops import Ops, VirtualRows, group_queries

PAGE = 128
NUM_HEADS, HEAD_SIZE = 7, 128
SCALE = float(torch.tensor(HEAD_SIZE**-0.5))  # a float32, as operators take it
_NUM_CONTENTS = 1021


@dataclass
class Branch:
    """One row: a cached prefix, then the blocks of its window; `shift` adds one more query a block.

    Branches of one `salt` hold the same tokens.
    """

    num_cached: int
    window: list[int]
    shift: bool = False
    salt: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.num_cached + sum(self.window)

    def entries(self) -> tuple[list[int], list[int], list[bool]]:
        """Positions, horizons and whether the entry provides a key: the window first, shift entries after it."""
        blocks = list(pairwise(np.cumsum([self.num_cached, *self.window]).tolist()))
        positions = [position for start, end in blocks for position in range(start, end)]
        horizons = [end for start, end in blocks for _ in range(start, end)]
        shifts = [(start - 1, end) for start, end in blocks if self.shift and start > 0]
        is_key = [True] * len(positions) + [False] * len(shifts)
        return positions + [at for at, _ in shifts], horizons + [end for _, end in shifts], is_key


@dataclass(frozen=True)
class Layout:
    """The flat batch of a step: which entry each token computes, where its key goes, what it sees."""

    branches: list[Branch]
    num_pages: int
    order_T: Tensor  # into the entries of all branches, one branch after another
    position_T: Tensor
    slot_T: Tensor
    rows: VirtualRows

    def per_branch(self, tokens: Tensor) -> list[Tensor]:
        """Back from the flat order to each branch's entries."""
        entries = torch.empty_like(tokens)
        entries[self.order_T] = tokens
        return list(entries.split([len(branch.entries()[0]) for branch in self.branches]))


def lay_out(branches: list[Branch], device: str = "cpu") -> Layout:
    num_pages = _share_pages(branches)
    entries = [branch.entries() for branch in branches]
    row = np.concatenate([np.full(len(positions), index) for index, (positions, _, _) in enumerate(entries)])
    groups = group_queries(row, np.concatenate([horizons for _, horizons, _ in entries]))
    order = torch.from_numpy(groups.order_T)
    position = torch.tensor([at for positions, _, _ in entries for at in positions])[order]
    slot = torch.tensor(_slots(branches), dtype=torch.int32)[order]
    table = _block_table(branches)[torch.from_numpy(groups.row_V)]
    rows = VirtualRows(table.to(device), groups.query_ends, groups.kv_lengths)
    return Layout(branches, num_pages, order, position, slot.to(device), rows)


class Contents:
    """Query, key and value of a position: random, but the same wherever the position and the salt are the same."""

    def __init__(self, num_kv_heads: int) -> None:
        draw = torch.Generator().manual_seed(3)
        self.query, self.key, self.value = (
            torch.randn(_NUM_CONTENTS, heads, HEAD_SIZE, generator=draw).bfloat16()
            for heads in (NUM_HEADS, num_kv_heads, num_kv_heads)
        )

    def at(self, positions: list[int], salt: int) -> tuple[Tensor, Tensor, Tensor]:
        index = (torch.tensor(positions, dtype=torch.long) + 97 * salt) % _NUM_CONTENTS
        return self.query[index], self.key[index], self.value[index]

    def sequence(self, branch: Branch) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole row: the cached ones belong to salt 0."""
        cached = self.at(list(range(branch.num_cached)), 0)
        window = self.at(list(range(branch.num_cached, branch.length)), branch.salt)
        return torch.cat((cached[1], window[1])), torch.cat((cached[2], window[2]))


def dense(branch: Branch, contents: Contents, weights: torch.dtype = torch.bfloat16) -> Tensor:
    """The mask written out. weights: the dtype that attention weights are rounded to."""
    query, _, _ = contents.at(branch.entries()[0], branch.salt)
    return plain.attention(query.to(weights), *contents.sequence(branch), hidden(branch), SCALE)


def hidden(branch: Branch) -> Tensor:
    """True where an entry does not see a key: at and after its horizon."""
    _, horizons, _ = branch.entries()
    return torch.arange(branch.length)[None, :] >= torch.tensor(horizons)[:, None]


def paged(ops: Ops, branches: list[Branch], contents: Contents, device: str = "cpu") -> list[Tensor]:
    """Attention of every branch in the engine's order of work: write the window's keys, then attend."""
    layout = lay_out(branches, device)
    caches = [torch.zeros(layout.num_pages, PAGE, contents.key.shape[1], HEAD_SIZE).bfloat16() for _ in "kv"]
    for branch in branches:
        fill_prefix(caches, branch, contents.at(list(range(branch.num_cached)), 0)[1:])
    parts = zip(*(contents.at(branch.entries()[0], branch.salt) for branch in branches), strict=True)
    query, key, value = (torch.cat(part)[layout.order_T].to(device) for part in parts)
    keys, values = (cache.to(device) for cache in caches)
    ops.write_kv(key, value, keys, values, layout.slot_T)
    return layout.per_branch(ops.paged_attention(query, keys, values, layout.rows, SCALE).cpu())


def fill_prefix(caches: list[Tensor], branch: Branch, prefix: tuple[Tensor, Tensor]) -> None:
    for cache, part in zip(caches, prefix, strict=True):
        for position in range(branch.num_cached):
            cache[branch.pages[position // PAGE], position % PAGE] = part[position]


def _share_pages(branches: list[Branch]) -> int:
    """Whole pages of the cached prefix are shared, the rest is private to each branch; page 0 is the dummy page."""
    shared = branches[0].num_cached // PAGE
    next_page = 1 + shared
    for branch in branches:
        num_private = -(-branch.length // PAGE) - shared
        branch.pages = [*range(1, 1 + shared), *range(next_page, next_page + num_private)]
        next_page += num_private
    return next_page


def _slots(branches: list[Branch]) -> list[int]:
    slots, num_dummies = [], 0
    for branch in branches:
        positions, _, is_key = branch.entries()
        for position, provides in zip(positions, is_key, strict=True):
            slots.append(branch.pages[position // PAGE] * PAGE + position % PAGE if provides else num_dummies)
            num_dummies += not provides
    return slots


def _block_table(branches: list[Branch]) -> Tensor:
    table = torch.zeros(len(branches), max(len(branch.pages) for branch in branches), dtype=torch.int32)
    for row, branch in zip(table, branches, strict=True):
        row[: len(branch.pages)] = torch.tensor(branch.pages, dtype=torch.int32)
    return table


# The step shapes whose attention the tests check, in both lanes.
CASES = {
    "first step: prompt and one block": [Branch(0, [100, 32])],
    "one active block": [Branch(132, [32])],
    "three blocks across a page border": [Branch(228, [32, 32, 32])],
    "branches with windows of different length": [
        Branch(260, [32, 32]),
        Branch(260, [32, 32, 32], salt=1),
        Branch(260, [32, 32], salt=2),
    ],
    "shift rows": [Branch(132, [32, 32, 32], shift=True)],
    "shift rows on the first step": [Branch(0, [100, 32], shift=True)],
    "shift rows of several branches": [Branch(260, [32, 32], shift=True), Branch(260, [32], shift=True, salt=1)],
    "nothing cached, small blocks": [Branch(0, [5, 8, 8, 8], shift=True)],
}
