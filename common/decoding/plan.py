"""What the scheduler asks of an engine, and what it gets back: plain numpy, no device.

A step's *rows* are (request, branch) pairs of any number of requests. A row's *entries* are its window positions,
followed by its shift entries where `shift_row: fresh` asks for them: queries that repeat the position before a block
so that the block's first token is predicted from what the window holds now. Shift entries read keys and never provide
any. Rows are concatenated without padding.

Shapes: R rows, T tokens (all entries of all rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from common.config import DecodeConfig
from common.constraints import Automaton
from common.policies import number_of

Int = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Float = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]
Score = npt.NDArray[np.float64]
Number = TypeVar("Number", bound=np.generic)


class RowField(IntEnum):
    """Numbers of a row, in the order in which StepPlan.row_fields_8R holds them; its properties say what they are."""

    FIRST = 0
    NUM_ENTRIES = 1
    NUM_KEYS = 2
    START = 3
    CACHED = 4
    SLOT = 5
    NOISE_KEY = 6
    STEP = 7


NUM_UPLOADED_FIELDS = RowField.SLOT + 1  # the first of them say which keys the row has, and go to the device


def part(block: npt.NDArray[Number], index: int) -> npt.NDArray[Number]:
    """Return one row of a block of arrays, typed."""
    found: npt.NDArray[Number] = block[index]
    return found


class SamplingField(IntEnum):
    """How a row's tokens are drawn, in the order in which StepPlan.sampling_3R holds it."""

    TEMPERATURE = 0  # 0: the most probable token
    TOP_P = 1
    TOP_K = 2  # 0: any number


_IN_KERNELS = ("default", "margin", "neg_entropy")  # token confidences that every head computes


class Sampling(NamedTuple):
    """What a pass does with its logits; the same for every row.

    strategy: how a token's confidence comes out of them. mask_token_id: the token that is never predicted.
    is_sampled: some row has a temperature above 0. is_cut: and top_p below 1, or a top_k. cfg_scale, penalty_lambda: as
    in DecodeConfig. counts_mask: the mask token has a part in the probabilities of the others. tempers_confidence:
    probabilities and confidences of rows that are drawn are those of the distribution that they are drawn from.
    num_best: so many of the most probable tokens are wanted too, the mask token among them where it counts.
    """

    strategy: str
    mask_token_id: int
    is_sampled: bool = False
    is_cut: bool = False
    cfg_scale: float = 0.0
    penalty_lambda: float = 0.0
    counts_mask: bool = False
    tempers_confidence: bool = False
    num_best: int = 0

    @property
    def num_values(self) -> int:
        """Numbers that a pass predicts for each position (Predictions.values_3T)."""
        return 3 + 2 * self.num_best

    @property
    def is_special(self) -> bool:
        """Whether the pass needs plain operators on its logits, since the kernels cannot do it."""
        if self.num_best:  # plain operators, but nothing is changed
            return False
        return bool(self.cfg_scale or self.penalty_lambda or self.counts_mask) or self.strategy not in _IN_KERNELS

    @classmethod
    def of(cls, decode: DecodeConfig, mask_token_id: int) -> Sampling:
        """Return what these settings ask for. mask_token_id: the model's, which the settings may replace."""
        own = mask_token_id if decode.mask_token_id is None else decode.mask_token_id
        is_cut = decode.top_p < 1 or decode.top_k is not None
        is_sampled, num_tried = decode.temperature > 0, int(number_of("spawn_rules", decode.spawn_rule, "tokens"))
        return cls(
            decode.sampling_strategy, own, is_sampled, is_cut, decode.strategy.guidance, decode.strategy.penalty,
            counts_mask=decode.mask_probability == "counted",
            tempers_confidence=decode.temperature_acts_on == "draw_and_confidence",
            num_best=max(decode.strategy.num_best, num_tried if num_tried > 1 else 0),
        )  # fmt: skip

    def of_rows(self, sampling_3R: Float | None) -> Sampling:
        """Return the same for rows with these sampling numbers (StepPlan.sampling_3R)."""
        if sampling_3R is None:
            return self._replace(is_sampled=False, is_cut=False) if self.is_sampled else self
        is_cut_R = (sampling_3R[SamplingField.TOP_P] < 1) | (sampling_3R[SamplingField.TOP_K] > 0)
        return self._replace(is_sampled=True, is_cut=bool(is_cut_R.any()))


class CommitSpan(NamedTuple):
    """Positions of one request whose KV this step makes final, taken from the winner's row."""

    request: int  # index of the request in this step, as in StepPlan.request_R
    slot: int
    start: int  # absolute; equals the window's start
    length: int
    is_final: bool = True  # else it is written over later in the request

    @property
    def end(self) -> int:
        return self.start + self.length


class StepPlan(NamedTuple):
    """One forward pass.

    entries_3T: token id, absolute position and horizon of each entry; an entry attends to keys at positions below its
    horizon (cached keys and the row's own window keys).
    is_read_T: entries whose next-token statistics the scheduler will read.
    row_fields_8R: what `RowField` names, one number a row.
    commits_locally: attention is block-causal, so a block's KV depends on nothing after it and every rank can commit
        its own copy.
    request_R: index of the row's request in this step; rows of one request are adjacent, lookaheads first, anchor last.
    num_guiding_rows: the last rows, in the order of the others: they change the logits of these, and nobody scores them
        or reads what they predict.
    sampling_3R: what `SamplingField` names, one number a row; None: every row is greedy.
    changes_2T: where sampling.is_special: the entry whose logits guide each entry's (its own: none do), and the token
    whose logit is lowered at each entry (-1: none).
    automaton_of: by index of a request whose answer is held to a format, what it is held to; None: no request's is.
    """

    entries_3T: Int32
    is_read_T: Bool
    row_fields_8R: Int
    request_R: Int
    commits: tuple[CommitSpan, ...]
    sampling: Sampling
    commits_locally: bool
    sampling_3R: Float | None = None
    changes_2T: Int | None = None
    num_guiding_rows: int = 0
    automaton_of: Mapping[int, Automaton] | None = None

    @property
    def num_rows(self) -> int:
        return int(self.request_R.shape[0])

    @property
    def scored(self) -> slice:
        """The rows that are branches."""
        return slice(self.num_rows - self.num_guiding_rows)

    @property
    def num_tokens(self) -> int:
        return int(self.is_read_T.shape[0])

    @property
    def token_T(self) -> Int32:
        return part(self.entries_3T, 0)

    @property
    def position_T(self) -> Int32:
        return part(self.entries_3T, 1)

    @property
    def horizon_T(self) -> Int32:
        return part(self.entries_3T, 2)

    @property
    def first_R(self) -> Int:
        """The row's first entry among the step's."""
        return part(self.row_fields_8R, RowField.FIRST)

    @property
    def num_entries_R(self) -> Int:
        """num_keys plus shift entries."""
        return part(self.row_fields_8R, RowField.NUM_ENTRIES)

    @property
    def num_keys_R(self) -> Int:
        """Window positions (entries that provide keys); they come first in the row."""
        return part(self.row_fields_8R, RowField.NUM_KEYS)

    @property
    def start_R(self) -> Int:
        """The window's first position; cached keys at positions in [0, start) are visible to the row."""
        return part(self.row_fields_8R, RowField.START)

    @property
    def cached_R(self) -> Int:
        """End of the row's cached keys. Above start + num_keys only in the dual cache, where the keys cached after the
        window, [start + num_keys, cached), are visible to every entry; otherwise equal to start."""
        return part(self.row_fields_8R, RowField.CACHED)

    @property
    def slot_R(self) -> Int:
        """The request's KV slot."""
        return part(self.row_fields_8R, RowField.SLOT)

    @property
    def noise_key_R(self) -> Int:
        """Keys the row's random numbers, together with step_R."""
        return part(self.row_fields_8R, RowField.NOISE_KEY)

    @property
    def step_R(self) -> Int:
        """How many passes the request has had, with those that a cached prefix has saved."""
        return part(self.row_fields_8R, RowField.STEP)

    def entries_of(self, rows: Int) -> Int:
        """Return the indices of the entries of `rows`, in their order."""
        return entries_from(self.first_R[rows], self.num_entries_R[rows])


def entries_from(first_R: Int, num_entries_R: Int) -> Int:
    """Return the indices of the entries of rows with these first entries and lengths, in their order."""
    end_R = num_entries_R.cumsum()
    entry_T: Int = (first_R - end_R + num_entries_R).repeat(num_entries_R) + np.arange(end_R[-1])
    return entry_T


class ClassField(IntEnum):
    """Numbers of a class of tokens at a position, in the order in which `ClassStatistics` holds them."""

    TOKEN = 0  # its most probable one, or a sample of it at temperature > 0
    LOGIT = 1  # of this token
    WEIGHT = 2  # the same at temperature 0; else log sum exp of the class's logits over the temperature
    MASS = 3  # log sum exp of the class's logits
    MEAN = 4  # of the class's logits, by their probabilities in the class


class ClassStatistics(NamedTuple):
    """What a pass predicts of an automaton's classes: `ClassField` of each, at each of these entries, ascending.

    `temperature_acts_on` says of which logits LOGIT, MASS and MEAN are. A class without a token has -1e30 and less.
    """

    entry_X: Int
    values_XC5: Float

    def at(self, entry_N: Int) -> Float:
        """[N, C, 5] of these entries."""
        found: Float = self.values_XC5[self.entry_X.searchsorted(entry_N)]
        return found


class Predictions(NamedTuple):
    """Statistics of the next token after each entry that the plan marks as read; other values are undefined.

    values_3T: predicted id (arg max, or the sample at temperature > 0), never the mask id; its probability (the
    maximum at temperature 0); the confidence under `sampling_strategy`. `temperature_acts_on` says of which
    distribution. float32, which holds ids below 2^24 exactly. Where sampling.num_best: after these as many token ids,
    the most probable first, and as many probabilities (where there are fewer tokens: -1 and 0).
    classes: where StepPlan.automaton_of is, by the key of each automaton; None of an engine that gives none.
    """

    values_3T: Float
    classes: Mapping[str, ClassStatistics] | None = None

    @classmethod
    def of(cls, token_T: Int, probability_T: Float, confidence_T: Float) -> Predictions:
        return cls(np.stack((token_T, probability_T, confidence_T), dtype=np.float32, casting="unsafe"))

    @property
    def token_T(self) -> Int:
        return part(self.values_3T, 0).astype(np.int64)

    @property
    def probability_T(self) -> Float:
        return part(self.values_3T, 1)

    @property
    def confidence_T(self) -> Float:
        return part(self.values_3T, 2)


class Logprobs(NamedTuple):
    """Log probabilities in a pass: of a token at each of F entries, and the C most probable tokens there, best first.

    Of the pass's logits as they are, at any temperature; the mask token has a part only where it is counted
    (`mask_probability`).
    """

    logprob_F: Float
    top_token_FC: Int
    top_logprob_FC: Float
