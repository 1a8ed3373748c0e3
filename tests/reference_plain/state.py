"""What is remembered of a request, and what one step of it looks like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from common.decoding.plan import Bool, Float, Int
from common.decoding.scheduling.state import Branch, DecodingRequest
from reference_plain.blocks import Block, BlockStrategy, Window

ANCHOR = Branch()


@dataclass(slots=True, eq=False, kw_only=True)
class PlainRequest(DecodingRequest):
    """A request being decoded: the anchor's tokens and blocks, and the branches of the coming step, the anchor last.

    token_S, is_masked_S: prompt and whole canvas by absolute position; positions not opened yet are masks.
    carry_3: token, probability and confidence predicted for the first position after the cache, kept from the step
        that committed the position before it.
    steps: tokens, rows, winner and window of each, as in `Completion`.
    num_given: generated tokens that the caller has been told of.
    """

    strategy: BlockStrategy
    token_S: Int
    is_masked_S: Bool
    blocks: list[Block]
    branches: list[Branch] = field(default_factory=lambda: [ANCHOR])
    carry_3: Float = field(default_factory=lambda: np.array([-1.0, 0.0, 0.0], dtype=np.float32))
    is_refreshed: bool = False  # fast_dllm: the cache around the current block is up to date
    has_eos: bool = False
    num_forwards: int = 0
    num_lookahead_wins: int = 0
    num_forced_fills: int = 0
    steps: list[tuple[int, int, int, int]] = field(default_factory=list)
    num_given: int = 0

    @property
    def lookaheads(self) -> list[tuple[int, int]]:
        """Position and token of each branch but the anchor."""
        return [branch.fills[0] for branch in self.branches[:-1]]

    @property
    def end(self) -> int:
        """Where both what has been opened and what was asked for end."""
        asked = self.prompt_length + self.rules.decode.max_new_tokens
        return max(self.prompt_length, min(self.blocks[-1].end, asked))

    def final_tokens(self) -> tuple[int, ...]:
        """Tokens of the answer after its first num_given that can no longer change: no mask lies before them, and no
        end."""
        begin, final_end = self.prompt_length + self.num_given, self.strategy.final_end(self.blocks)
        end = self.end if final_end is None else min(self.end, final_end)
        is_masked = self.is_masked_S[begin:end]
        if not is_masked.size or is_masked[0]:
            return ()
        num_final = int(is_masked.argmax()) or is_masked.size
        token_ids = tuple(self.token_S[begin : begin + num_final].tolist())
        ends = self.rules.end_token_ids if self.has_eos else ()
        if self.num_given and int(self.token_S[begin - 1]) in ends:
            return ()
        end = next((place for place, token in enumerate(token_ids) if token in ends), len(token_ids))
        return token_ids[: end + 1]

    def block_at(self, position: int) -> Block:
        return next(block for block in reversed(self.blocks) if block.start <= position)


class RequestStep(NamedTuple):
    """One request's part of a step: rows [first_row, end_row) and what they hold.

    window: the widest branch's. opens_block: of each branch; what the winner opens becomes the request's. widths: of
    each branch's own window. ends: of each, the column after which it has no masks. firsts: where the rows begin
    among the request's entries. shift_column_of: block start -> column of its shift entry after the row's keys.
    """

    decoding: PlainRequest
    first_row: int
    window: Window
    opens_block: list[bool]
    widths: tuple[int, ...]
    ends: tuple[int, ...]
    shift_column_of: dict[int, int]

    @property
    def lengths(self) -> list[int]:
        """Entries of each row."""
        return [width + len(self.shift_column_of) for width in self.widths]

    @property
    def first_B(self) -> Int:
        """Where rows begin among the request's entries."""
        return np.cumsum([0, *self.lengths[:-1]])

    @property
    def behind_keys_B(self) -> Int:
        """Where their keys have ended."""
        return self.first_B + np.array(self.widths)

    @property
    def reads_carry(self) -> bool:
        """Whether the step predicts the first position after what it commits, for the next step."""
        rules = self.decoding.rules
        is_carried = self.decoding.strategy.keeps_carry and rules.decode.shift_row == "stale" and rules.shift
        return bool(self.window.commit_length and is_carried)


class Aligned(NamedTuple):
    """A request's predictions (token, probability, confidence, as in `Predictions`) aligned with its window: column j
    speaks of position window.start + j. next_3B: of the position after the window; None unless `predicts_next`."""

    values_3BW: Float
    next_3B: Float | None
