"""What the scheduler remembers about a request, and what one step of it looked like. Typed values, no behaviour to
speak of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import numpy as np

from common.decoding.plan import Bool, Float, Int, RowField, part
from reference_plain.blocks import Block, BlockStrategy, Window
from reference_plain.ending import Canvas
from reference_plain.spans import Spans
from reference_plain.state_shared import DecodingRequest


class Branch(NamedTuple):
    """The anchor, or the anchor plus one token."""

    position: int | None = None  # absolute; None for the anchor
    token: int = -1
    creation_confidence: float = 1.0


ANCHOR = Branch()


@dataclass(slots=True, eq=False)
class Branches(Sequence[Branch]):
    """The lookaheads of a step in order of descending creation confidence, and the anchor, which comes last.

    positions, tokens, confidences: of the lookaheads, as columns: a step goes through them several times.
    """

    positions: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.positions) + 1

    @overload
    def __getitem__(self, place: int) -> Branch: ...

    @overload
    def __getitem__(self, place: slice) -> list[Branch]: ...

    def __getitem__(self, place: int | slice) -> Branch | list[Branch]:
        return [*self][place]

    def __iter__(self) -> Iterator[Branch]:
        return iter([*map(Branch, self.positions, self.tokens, self.confidences), ANCHOR])

    def keep(self, count: int) -> None:
        """Of the lookaheads no more than the first so many."""
        for column in (self.positions, self.tokens, self.confidences):
            del column[count:]


@dataclass(slots=True, eq=False, kw_only=True)
class PlainRequest(DecodingRequest):
    """A request being decoded: the anchor's tokens and blocks, and the branches of the coming step.

    token_S, is_masked_S: prompt and whole canvas by absolute position; positions not opened yet are masks.
    row_fields_81: what a step's rows have in common, as in `RowField`; 0 elsewhere.
    carry_31: token, probability and confidence predicted for the first position behind the cache, kept from the step
        that committed the position before it.
    num_given: generated tokens that the caller has been told of.
    """

    strategy: BlockStrategy
    token_S: Int
    is_masked_S: Bool
    blocks: list[Block]
    branches: Branches = field(default_factory=Branches)
    row_fields_81: Int = field(init=False)
    carry_31: Float = field(default_factory=lambda: np.array([[-1.0], [0.0], [0.0]], dtype=np.float32))
    is_refreshed: bool = False  # fast_dllm: the cache around the current block is up to date
    has_eos: bool = False
    num_forwards: int = 0
    num_lookahead_wins: int = 0
    num_given: int = 0

    def __post_init__(self) -> None:
        self.row_fields_81 = np.zeros((len(RowField), 1), dtype=np.int64)
        self.row_fields_81[RowField.SLOT], self.row_fields_81[RowField.NOISE_KEY] = self.slot, self.noise_key

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

    def block_at(self, position: int) -> Block:
        index = len(self.blocks) - 1
        while self.blocks[index].start > position:
            index -= 1
        return self.blocks[index]


class RequestStep(NamedTuple):
    """One request's part of a step: rows [first_row, end_row) and what they hold.

    window: the widest branch's. opens_block: of each branch; what the winner opens becomes the request's. widths: of
    each branch's own window. spans: where the rows lie.
    shift_column_of: block start -> column of its shift entry behind the row's keys.
    """

    decoding: PlainRequest
    first_row: int
    end_row: int
    window: Window
    opens_block: list[bool]
    widths: tuple[int, ...]
    spans: Spans
    shift_column_of: dict[int, int]

    @property
    def reads_carry(self) -> bool:
        """Whether the step predicts the first position behind what it commits, for the next step."""
        if not self.window.commit_length:
            return False
        rules = self.decoding.rules
        return bool(self.decoding.strategy.keeps_carry and rules.decode.shift_row == "stale" and rules.shift)


class Aligned(NamedTuple):
    """A request's predictions (token, probability, confidence, as in `Predictions`) aligned with its window: column j
    speaks of position window.start + j. next_3B: of the position behind the window; None unless `predicts_next`."""

    values_3BW: Float
    next_3B: Float | None = None

    def of_branch(self, branch: int, first_column: int = 0) -> Float:
        """[3, W]: what this branch predicts, from a column on."""
        values_3W: Float = self.values_3BW[:, branch, first_column:]
        return values_3W

    @property
    def probability_BW(self) -> Float:
        return part(self.values_3BW, 1)

    @property
    def confidence_BW(self) -> Float:
        return part(self.values_3BW, 2)
