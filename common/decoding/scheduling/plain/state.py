"""What the scheduler remembers about a request, and what one step of it looked like. Typed values, no behaviour to
speak of."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from common.decoding.plan import Bool, Float, Int, part
from common.decoding.scheduling.ending import Canvas
from common.decoding.scheduling.plain.blocks import Block, BlockStrategy, Window
from common.decoding.scheduling.state import DecodingRequest


class Branch(NamedTuple):
    """The anchor, or the anchor plus one token."""

    position: int | None = None  # absolute; None for the anchor
    token: int = -1
    creation_confidence: float = 1.0


ANCHOR = Branch()


@dataclass(slots=True, eq=False, kw_only=True)
class PlainRequest(DecodingRequest):
    """A request being decoded: the anchor's tokens and blocks, and the branches of the coming step.

    token_S, is_masked_S: prompt and whole canvas by absolute position; positions not opened yet are masks.
    branches: lookaheads in order of descending creation confidence, the anchor last.
    carry_31: token, probability and confidence predicted for the first position behind the cache, kept from the step
        that committed the position before it.
    num_given: generated tokens that the caller has been told of.
    """

    strategy: BlockStrategy
    token_S: Int
    is_masked_S: Bool
    blocks: list[Block]
    branches: list[Branch] = field(default_factory=lambda: [ANCHOR])
    carry_31: Float = field(default_factory=lambda: np.array([[-1.0], [0.0], [0.0]], dtype=np.float32))
    is_refreshed: bool = False  # fast_dllm: the cache around the current block is up to date
    has_eos: bool = False
    num_forwards: int = 0
    num_lookahead_wins: int = 0
    num_given: int = 0

    @property
    def end(self) -> int:
        """Of what has been opened and asked for."""
        asked = self.prompt_length + self.rules.decode.max_new_tokens
        return max(self.prompt_length, min(self.blocks[-1].end, asked))

    @property
    def canvas(self) -> Canvas:
        own = slice(self.prompt_length, self.end)
        counts = self.has_eos, self.num_forwards, self.num_lookahead_wins
        final_end = self.strategy.final_end(self.blocks)
        num_final = None if final_end is None else max(0, final_end - self.prompt_length)
        return Canvas(self.token_S[own], self.is_masked_S[own], *counts, num_final)

    def final_tokens(self) -> tuple[int, ...]:
        """Of the answer, what follows its first num_given tokens and can no longer change: no mask lies before it, and
        no end."""
        begin, final_end = self.prompt_length + self.num_given, self.strategy.final_end(self.blocks)
        end = self.end if final_end is None else min(self.end, final_end)
        is_masked = self.is_masked_S[begin:end]
        if not is_masked.size or is_masked[0]:
            return ()
        num_final = int(is_masked.argmax()) or is_masked.size
        token_ids = tuple(self.token_S[begin : begin + num_final].tolist())
        if not self.has_eos:
            return token_ids
        ends = self.rules.end_token_ids
        if self.num_given and int(self.token_S[begin - 1]) in ends:
            return ()
        end = next((place for place, token in enumerate(token_ids) if token in ends), len(token_ids))
        return token_ids[: end + 1]

    def block_index_at(self, position: int) -> int:
        index = len(self.blocks) - 1
        while self.blocks[index].start > position:
            index -= 1
        return index


class Spans(NamedTuple):
    """How long the rows of one request are, and where they lie among its entries.

    rows_3B: first entry, number of entries, number of keys. shape: rows, and entries of the longest. is_even: all are
    equally long.
    """

    rows_3B: Int
    end_B: Int
    entries: tuple[slice, ...]
    num_entries: int
    shape: tuple[int, int]
    is_even: bool


@lru_cache(maxsize=256)  # windows are of the same length for several steps
def spans_of(num_keys: tuple[int, ...], num_shifts: int) -> Spans:
    """Of rows of so many keys, with as many shift entries behind each."""
    lengths = [count + num_shifts for count in num_keys]
    ends = list(accumulate(lengths))
    firsts = [0, *ends[:-1]]
    rows_3B, end_B = np.array((firsts, lengths, num_keys), dtype=np.int64), np.array(ends, dtype=np.int64)
    rows_3B.flags.writeable = end_B.flags.writeable = False  # shared by every step of these lengths
    shape, is_even = (len(lengths), max(lengths)), len(set(lengths)) == 1
    return Spans(rows_3B, end_B, tuple(map(slice, firsts, ends)), ends[-1], shape, is_even)


class RequestStep(NamedTuple):
    """One request's part of a step: rows [first_row, end_row) and what they hold.

    window: the widest branch's. opens_block: of each branch; what the winner opens becomes the request's. ends: each
    branch's own end. spans: how long the rows are.
    shift_column_of: block start -> column of its shift entry behind the row's keys.
    """

    decoding: PlainRequest
    first_row: int
    end_row: int
    window: Window
    opens_block: list[bool]
    ends: list[int]
    spans: Spans
    is_masked_BW: Bool
    shift_column_of: dict[int, int]

    @property
    def reads_carry(self) -> bool:
        """Whether the step predicts the first position behind what it commits, for the next step."""
        rules = self.decoding.rules
        is_kept = self.decoding.strategy.keeps_carry and rules.decode.shift_row == "stale"
        return bool(is_kept and rules.shift and self.window.commit_length)


class Aligned(NamedTuple):
    """A request's predictions (token, probability, confidence, as in `Predictions`) aligned with its window: column j
    speaks of position window.start + j. next_3B: of the position behind the window; None unless `predicts_next`."""

    values_3BW: Float
    next_3B: Float | None = None

    def tokens(self, branch: int, column_N: Int) -> Int:
        """Ids that this branch predicts in these columns."""
        token_N: Int = self.values_3BW[0, branch].take(column_N).astype(np.int64)
        return token_N

    @property
    def probability_BW(self) -> Float:
        return part(self.values_3BW, 1)

    @property
    def confidence_BW(self) -> Float:
        return part(self.values_3BW, 2)
