"""Requests of one kind as arrays, so that a step costs a few operations over all of them instead of many for each.

Shapes: N requests, of which those that come take the places of those that have ended; M blocks (block 0 is the
prompt); B branches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from common.decoding.plan import Bool, Float, Int, Score
from common.decoding.scheduling.arrays.tokens import TableRequest, TokenTable
from common.decoding.scheduling.rules import Kind

ANCHOR = -1  # position and token of the branch that adds none
_NO_EOS = -2  # no branch's token, the anchor's neither
_NO_CARRY_31 = np.array([[-1], [0], [0]], dtype=np.float32)

# What rows take from their request: the first of them as StepPlan.row_fields_8R has them, from RowField.START on.
OF_ROWS = (
    "start_N", "cached_N", "slot_N", "noise_key_N", "num_forwards_N", "offset_N", "last_start_N", "slack_N", "eos_N",
    "num_masked_N", "next_N", "end_N",
)  # fmt: skip
_INTEGERS = (
    *OF_ROWS, "first_open_N", "num_blocks_N", "prompt_N", "origin_N", "commit_N", "num_branches_N", "num_wins_N",
    "num_given_N", "max_blocks_N", "num_lookahead_N", "max_steps_N", "add_limit_N", "activation_limit_N",
)  # fmt: skip
_NEXT, _FIRST_OPEN = _INTEGERS.index("next_N"), _INTEGERS.index("first_open_N")  # and the one behind each
_SWITCHES = ("is_refreshed_N", "has_eos_N", "may_end_N")


class RequestBatch:
    """What is known of each request between two steps, and the window of the step under way.

    The window: positions [start, end) beside cached keys up to `cached`; the first `commit` of them become final. next:
    where the following window begins, whose first position is predicted from this one, and where filling begins.
    num_blocks: opened so far; max_blocks: 0 once an end token is there. first_open: the first block that holds masks.
    last_start: where the last block begins. slack: how many more masks than it has the last block may hold for a branch
        to open another one; below -1 if there is none to open.
    over: places whose requests have ended, until `renew`.
    offset: of position 0 in the token table. origin: where block 0 would begin if it were as long as the others.
    is_refreshed: `fast_dllm`: the cache around the current block is up to date.
    num_given: generated tokens that the caller has been told of. may_end: what has been filled may hold an end token or
        a stop string.
    add_limit, activation_limit: masks of a block up to which tau_add and tau_act are reached. A block whose predecessor
        has come to tau_act has to fill at least one position a step; every block where all are there from the start.
    num_masked_NM: masks left in each block; all of it while it has not been opened. num_masked: of the open ones.
    num_masked_X, num_before_X: the same, one request's behind another's, and of the block before each; before_N is to
        be added to a request's block.
    column_W, before_W: 0, 1, 2 ... of a block's positions, and -1, 0, 1 ... of those before them.
    bounds_2N: next and end. open_2N: first_open and num_blocks.
    branch_2NB, confidence_NB: each lookahead's position and token beside the anchor's, in order of descending
        confidence; anything behind them. num_branches: with the anchor.
    sampling_3N: in the order of plan.SamplingField. is_sampled: whether any request is. is_weighted: whether
        any has a creation_weight. has_begun: some have not had a step. place_N: 0, 1, 2 ...
    carry_3N: token, probability and confidence predicted for the first position behind the cache, kept from the step
        that committed the position before it.
    """

    start_N: Int
    cached_N: Int
    slot_N: Int
    noise_key_N: Int
    num_forwards_N: Int
    end_N: Int
    offset_N: Int
    last_start_N: Int
    slack_N: Int
    eos_N: Int
    prompt_N: Int
    origin_N: Int
    next_N: Int
    commit_N: Int
    num_blocks_N: Int
    first_open_N: Int
    num_masked_N: Int
    num_branches_N: Int
    num_wins_N: Int
    num_given_N: Int
    max_blocks_N: Int
    num_lookahead_N: Int
    max_steps_N: Int
    add_limit_N: Int
    activation_limit_N: Int
    is_refreshed_N: Bool
    has_eos_N: Bool
    may_end_N: Bool

    def __init__(self, kind: Kind, tokens: TokenTable) -> None:
        self.kind = kind
        self.tokens = tokens
        self.requests: list[TableRequest] = []
        self.over: list[int] = []
        self.integers_FN = np.zeros((len(_INTEGERS), 0), dtype=np.int64)
        self._switches_FN = np.zeros((len(_SWITCHES), 0), dtype=np.bool_)
        self.skip_threshold_N: Float = np.zeros(0, dtype=np.float32)
        self.creation_weight_N: Score = np.zeros(0)
        self.num_masked_NM: Int = np.zeros((0, 0), dtype=np.int64)
        self.branch_2NB: Int = np.zeros((2, 0, 0), dtype=np.int64)
        self.confidence_NB: Float = np.zeros((0, 0), dtype=np.float32)
        self.carry_3N: Float = np.zeros((3, 0), dtype=np.float32)
        self.sampling_3N: Float = np.zeros((3, 0), dtype=np.float32)
        self.is_sampled = self.is_weighted = self.has_begun = False
        self._eos_tokens: set[int] = set()  # of all that have been here
        self.size = np.array(kind.block_size)  # which is added to arrays in half of the time that an int takes
        self.column_W = np.arange(kind.block_size)
        self.before_W = self.column_W - 1
        self._name()

    def __len__(self) -> int:
        return len(self.requests)

    def key_of(self, place: int) -> tuple[int, int]:
        """What a request's random numbers are keyed by: itself and its step."""
        return int(self.noise_key_N[place]), int(self.num_forwards_N[place])

    def renew(self, requests: list[TableRequest]) -> None:
        """Forget those that are over; these are about to begin, in the places of the others as far as there are. So a
        batch that is as full as before keeps its arrays."""
        over, self.over = self.over, []
        places, num_more = over[: len(requests)], len(requests) - len(over)
        if num_more > 0:
            places = [*places, *range(len(self), len(self) + num_more)]
            self.requests += requests[-num_more:]
            self._resize(len(self))
        if requests:
            self._begin(requests, places)
        if num_more < 0:
            self._keep(np.delete(self.place_N, over[len(requests) :]))

    def _begin(self, requests: list[TableRequest], places: list[int]) -> None:
        place_X, kind, stride = np.array(places), self.kind, self.tokens.stride
        all_rules = [decoding.rules for decoding in requests]
        num_blocks = max(rules.max_blocks + 2 for rules in all_rules)
        num_branches = max(rules.decode.num_lookahead + 1 for rules in all_rules)
        if num_blocks > self.num_masked_NM.shape[1] or num_branches > self.confidence_NB.shape[1]:
            self._resize(len(self), num_blocks, num_branches)
        states = [_initial_state(decoding, stride) for decoding in requests]
        self.integers_FN[:, place_X] = np.array([[state.get(name, 0) for name in _INTEGERS] for state in states]).T
        self._switches_FN[:, place_X] = np.array([(False, False, rules.find_stop is not None) for rules in all_rules]).T
        self.skip_threshold_N[place_X] = [rules.decode.skip_threshold for rules in all_rules]
        self.creation_weight_N[place_X] = [rules.decode.creation_weight for rules in all_rules]
        self.carry_3N[:, place_X] = _NO_CARRY_31
        self.sampling_3N[:, place_X] = np.array([rules.sampling for rules in all_rules]).T
        self._note_settings()
        self.has_begun = True
        self._eos_tokens.update(self.eos_N[place_X].tolist())
        self.num_masked_NM[place_X] = kind.block_size
        self.num_masked_NM[place_X, 0] = 0
        for place, decoding in zip(places, requests, strict=True):
            self.requests[place] = decoding

    def note_ends(self, place_X: Int, token_X: Int) -> None:
        """These requests, of which some come several times, have these new tokens."""
        if not self._eos_tokens.isdisjoint(token_X.tolist()):
            self.end(place_X[token_X == self.eos_N[place_X]])

    def end(self, place_X: Int | int) -> None:
        """These requests have an end token, and open no more blocks."""
        self.has_eos_N[place_X] = self.may_end_N[place_X] = True
        self.max_blocks_N[place_X] = 0

    def keep_lookaheads(self, count_N: Int) -> None:
        """Drop all but each request's first so many."""
        np.minimum(self.num_branches_N, count_N + 1, out=self.num_branches_N)

    def _resize(self, num_requests: int, num_blocks: int = 0, num_branches: int = 0) -> None:
        """Room for so many, whatever stands there."""
        for name in ("integers_FN", "_switches_FN", "carry_3N", "sampling_3N"):
            values = getattr(self, name)
            setattr(self, name, _grown(values, (len(values), num_requests)))
        self.skip_threshold_N = _grown(self.skip_threshold_N, (num_requests,))
        self.creation_weight_N = _grown(self.creation_weight_N, (num_requests,))
        num_blocks = max(num_blocks, self.num_masked_NM.shape[1])
        num_branches = max(num_branches, self.confidence_NB.shape[1])
        self.num_masked_NM = _grown(self.num_masked_NM, (num_requests, num_blocks), fill=self.kind.block_size)
        self.branch_2NB = _grown(self.branch_2NB, (2, num_requests, num_branches))
        self.confidence_NB = _grown(self.confidence_NB, (num_requests, num_branches))
        self._name()

    def _keep(self, place_N: Int) -> None:
        """Keep the requests at these places, in this order, and forget the others."""
        for name in ("integers_FN", "_switches_FN", "carry_3N", "sampling_3N"):
            setattr(self, name, getattr(self, name).take(place_N, axis=1))
        for name in ("num_masked_NM", "confidence_NB", "skip_threshold_N", "creation_weight_N"):
            setattr(self, name, getattr(self, name)[place_N])
        self.branch_2NB = self.branch_2NB.take(place_N, axis=1)
        self.requests = [self.requests[place] for place in place_N.tolist()]
        self._note_settings()
        self._name()

    def _note_settings(self) -> None:
        self.is_sampled = bool(self.sampling_3N[0].any())
        self.is_weighted = bool(self.creation_weight_N.any())

    def _name(self) -> None:
        self.place_N = np.arange(len(self))
        self.num_before_X = self.num_masked_NM.reshape(-1)  # a view
        self.num_masked_X = self.num_before_X[1:]
        self.before_N = self.place_N * self.num_masked_NM.shape[1] - 1
        self.of_rows_FN = self.integers_FN[: len(OF_ROWS)]
        self.bounds_2N = self.integers_FN[_NEXT : _NEXT + 2]
        self.open_2N = self.integers_FN[_FIRST_OPEN : _FIRST_OPEN + 2]
        self.__dict__.update(zip(_INTEGERS, self.integers_FN, strict=True))
        self.__dict__.update(zip(_SWITCHES, self._switches_FN, strict=True))


def _initial_state(decoding: TableRequest, stride: int) -> dict[str, int]:
    """D2F begins with the prompt, which its first step commits; the others know all of their blocks."""
    rules, prompt = decoding.rules, decoding.prompt_length
    decode, kind, size = rules.decode, rules.kind, rules.kind.block_size
    is_pipelined = kind.strategy == "d2f"
    num_canvas_blocks = 0 if is_pipelined else rules.max_blocks
    return {
        "start_N": decoding.num_reused,
        "slot_N": decoding.slot,
        "noise_key_N": decoding.noise_key,
        "offset_N": decoding.slot * stride,
        "prompt_N": prompt,
        "origin_N": prompt - size,
        "num_blocks_N": 1 + num_canvas_blocks,
        "first_open_N": 1,
        "num_masked_N": num_canvas_blocks * size,
        "num_branches_N": 1,
        "max_blocks_N": rules.max_blocks if is_pipelined else 0,
        "num_lookahead_N": decode.num_lookahead,
        "max_steps_N": rules.max_steps,
        "eos_N": _NO_EOS if rules.eos_token_id is None else rules.eos_token_id,
        "add_limit_N": most_masked(decode.block_add_threshold, size),
        "activation_limit_N": most_masked(decode.decoded_token_threshold, size) if is_pipelined else size,
    }


@cache
def most_masked(filled_share: float, block_size: int) -> int:
    """The most masks of a block of which this share is filled."""
    counts = range(block_size, -1, -1)
    return next((count for count in counts if 1.0 - count / block_size >= filled_share), 0)


def _grown(values: Any, shape: tuple[int, ...], fill: Any = 0) -> Any:
    """The same values, and others behind them."""
    grown = np.full(shape, fill, dtype=values.dtype)
    grown[tuple(slice(0, length) for length in values.shape)] = values
    return grown
