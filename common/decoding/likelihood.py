"""How likely a model takes a given text to be: estimated over random maskings of it, in passes that fill nothing.

LLaDA's estimator (arXiv 2502.09992, `get_log_likelihood` of its evaluation): mask k of a text's L tokens, k strata of
1 ... L, and take L / k times the sum of their log probabilities given the rest; the mean over maskings estimates a
lower bound of the text's log likelihood. Where attention is block-causal each block is estimated by itself after those
before it, whole, and the sums are added; what is left of its last block stays masked, as while it is decoded.

Shapes: R rows, T tokens of a pass, M masked tokens of a row, F of a pass.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import NamedTuple, cast

import numpy as np

from common.config import DecodeConfig
from common.decoding.admission import unknown_tokens
from common.decoding.engine import Engine, GivesLogprobs, Room, prefixes_of
from common.decoding.plan import Int, RowField, Sampling, Score, StepPlan
from common.errors import ConfigError, EngineError

Ids = Sequence[int]
_Rows = list[tuple["_Open", "_Row"]]


class Likelihood(NamedTuple):
    """Natural log of a text's probability after its prompt, as estimated, and the estimate's standard error; None where
    one masking says nothing of it. num_rows: maskings that were computed."""

    logprob: float
    standard_error: float | None
    num_rows: int


class _Span(NamedTuple):
    """Tokens [begin, end) of prompt and text, which are estimated together; a row of it ends at `row_end`."""

    begin: int
    end: int
    row_end: int


class _Row(NamedTuple):
    span: int  # of its text
    weight: float
    token_T: Int
    prompt_length: int
    position_M: Int
    own_M: Int  # the text's tokens there


@dataclass(slots=True)
class _Open:
    """A text under way. values: of the maskings of each span so far. missing: rows that have not been computed."""

    spans: list[_Span]
    values: list[list[float]]
    missing: int

    def estimate(self) -> Likelihood:
        """Return the sum of the means, and its standard error, which the strata make smaller than it says."""
        total, variance, num_rows, is_known = 0.0, 0.0, 0, True
        for span, values in zip(self.spans, self.values, strict=True):
            total, num_rows = total + sum(values) / len(values), num_rows + len(values)
            if len(values) > 1:
                variance += float(np.var(values, ddof=1)) / len(values)
            elif span.end - span.begin > 1:
                is_known = False
        return Likelihood(total, sqrt(variance) if is_known else None, num_rows)


class TextScorer:
    """Estimates likelihoods on an engine that gives log probabilities, while nothing is decoded on it.

    shift: as ModelFacts has it. num_maskings: of each text or block; a single token needs one. most_tokens: of a pass.
    """

    def __init__(
        self, engine: Engine, decode: DecodeConfig, *, mask_token_id: int, shift: int, num_maskings: int, seed: int,
        most_tokens: int,
    ) -> None:  # fmt: skip
        if not engine.capacity.gives_logprobs:
            raise ConfigError("likelihood: this engine tells no log probabilities; choose another")
        self._engine = engine
        self._decode = decode
        own = Sampling.of(decode, mask_token_id)
        self._sampling = Sampling("default", own.mask_token_id, counts_mask=own.counts_mask)
        self._shift = shift
        self._num_maskings = num_maskings
        self._seed = seed
        self._most_tokens = most_tokens
        self._is_causal = decode.window_attention == "block_causal"

    def why_not(self, prompt: Ids, text: Ids) -> str | None:
        """Return why a text cannot be scored, in one sentence; None if it can."""
        most, vocab_size = self._engine.capacity.max_model_len, self._engine.capacity.vocab_size
        if not prompt or not text:
            return f"the {'text' if prompt else 'prompt'} is empty: give at least one token"
        if unknown_tokens((*prompt, *text), vocab_size):
            return "it holds what is no token of the model: use the tokenizer of this checkpoint"
        if self._sampling.mask_token_id in (*prompt, *text):
            return f"it holds the mask token {self._sampling.mask_token_id}, which is no text: leave it out"
        length = self._spans(len(prompt), len(text))[-1].row_end
        if length > most:
            return f"prompt and text come to {length} positions, and {most} fit: shorten the prompt"
        return None

    def longest_prompt(self, text_length: int) -> int:
        """Return the tokens of the longest prompt that fits before a text; below 1 where none does."""
        rest = self._decode.block_size - 1 if self._is_causal else 0
        return self._engine.capacity.max_model_len - text_length - rest

    def scores(self, texts: Iterable[tuple[Ids, Ids]]) -> Iterator[Likelihood]:
        """Yield the likelihood of each text after its prompt, in their order. Every rank of a replica makes the same
        call. Raises ConfigError for what `why_not` refuses."""
        prefixes = prefixes_of(self._engine)
        if prefixes is not None:
            prefixes.forget()  # its rows take pages that no scheduler has reserved
        waiting: deque[_Open] = deque()
        rows: _Rows = []
        for prompt, text in texts:
            if (reason := self.why_not(prompt, text)) is not None:
                raise ConfigError(f"likelihood: {reason}")
            spans = self._spans(len(prompt), len(text))
            made = self._rows(prompt, text, spans)
            waiting.append(_Open(spans, [[] for _ in spans], len(made)))
            rows += [(waiting[-1], row) for row in made]
            while len(taken := self._pass_of(rows)) < len(rows):
                self._run(taken)
                rows = rows[len(taken) :]
            while waiting and not waiting[0].missing:
                yield waiting.popleft().estimate()
        while rows:
            taken = self._pass_of(rows)
            self._run(taken)
            rows = rows[len(taken) :]
        yield from (each.estimate() for each in waiting)

    def _spans(self, prompt_length: int, text_length: int) -> list[_Span]:
        end, size = prompt_length + text_length, self._decode.block_size
        if not self._is_causal:
            return [_Span(prompt_length, end, end)]
        block = Room(prompt_length, self._decode).block_start
        spans = []
        while block < end:
            spans.append(_Span(max(block, prompt_length), min(block + size, end), block + size))
            block += size
        return spans

    def _rows(self, prompt: Ids, text: Ids, spans: list[_Span]) -> list[_Row]:
        token_S = np.array([*prompt, *text], np.int64)
        # The same maskings of the same text, wherever it stands among others.
        rng = np.random.default_rng([self._seed, zlib.crc32(token_S.tobytes()), len(text)])
        rows = []
        for place, span in enumerate(spans):
            length = span.end - span.begin
            for count in _strata(length, self._num_maskings, rng).tolist():
                position_M = span.begin + np.sort(rng.permutation(length)[:count])
                token_T = np.full(span.row_end, self._sampling.mask_token_id, np.int64)
                token_T[: span.end] = token_S[: span.end]
                token_T[position_M] = self._sampling.mask_token_id
                rows.append(_Row(place, length / count, token_T, len(prompt), position_M, token_S[position_M]))
        return rows

    def _pass_of(self, rows: _Rows) -> _Rows:
        """Return the first rows, as many as a pass takes; each is a request of its own to the engine's memory."""
        capacity, taken, num_tokens = self._engine.capacity, 0, 0
        rooms: list[Room] = []
        for _, row in rows[: capacity.num_slots]:
            num_tokens += len(row.token_T)
            rooms.append(Room(len(row.token_T), self._decode))
            if taken and (num_tokens > self._most_tokens or not capacity.can_hold(rooms)):
                break
            taken += 1
        return rows[:taken]

    def _run(self, rows: _Rows) -> None:
        plan, entry_F, token_F = self._plan([row for _, row in rows])
        self._engine.forward(plan)
        told = cast(GivesLogprobs, self._engine).logprobs(plan, entry_F, token_F, 0)
        begin = 0
        for of_text, row in rows:
            end = begin + len(row.position_M)
            value = row.weight * float(told.logprob_F[begin:end].sum(dtype=np.float64))
            if not isfinite(value):
                raise EngineError("likelihood: the model's output is not finite; choose another dtype or checkpoint")
            of_text.values[row.span].append(value)
            of_text.missing -= 1
            begin = end

    def _plan(self, rows: list[_Row]) -> tuple[StepPlan, Int, Int]:
        length_R = np.array([len(row.token_T) for row in rows])
        first_R = length_R.cumsum() - length_R
        position_T = np.concatenate([np.arange(length) for length in length_R.tolist()])
        horizon_T = np.concatenate([self._horizons(row) for row in rows])
        entry_F = np.concatenate(
            [first + row.position_M - self._shift for first, row in zip(first_R.tolist(), rows, strict=True)]
        )
        is_read_T = np.zeros(len(position_T), np.bool_)
        is_read_T[entry_F] = True
        fields_8R = np.zeros((len(RowField), len(rows)), np.int64)
        fields_8R[RowField.FIRST], fields_8R[RowField.SLOT] = first_R, np.arange(len(rows))
        fields_8R[RowField.NUM_ENTRIES] = fields_8R[RowField.NUM_KEYS] = length_R
        token_T = np.concatenate([row.token_T for row in rows])
        entries_3T = np.stack((token_T, position_T, horizon_T)).astype(np.int32)
        request_R = np.arange(len(rows), dtype=np.int64)
        plan = StepPlan(entries_3T, is_read_T, fields_8R, request_R, (), self._sampling, self._is_causal)
        return plan, entry_F, np.concatenate([row.own_M for row in rows])

    def _horizons(self, row: _Row) -> Int:
        """Return below which position each entry sees keys, as the scheduler's plans have it."""
        length, size = len(row.token_T), self._decode.block_size
        if not self._is_causal:
            return np.full(length, length)
        origin = 0 if self._decode.strategy.is_from_zero else row.prompt_length
        horizon_T: Int = np.maximum((np.arange(length) - origin) // size + 1, 0) * size + origin
        return np.minimum(horizon_T, length)


def _strata(length: int, count: int, rng: np.random.Generator) -> Int:
    """Return how many of `length` tokens each masking masks: `count` numbers at equal distances around the circle of
    1 ... length, from a random one on."""
    if length == 1:
        return np.ones(1, np.int64)
    start = float(rng.integers(1, length + 1))
    found_X: Score = np.linspace(start, start + (count - 1) * (length / count), count).round()
    return (found_X.astype(np.int64) - 1) % length + 1
