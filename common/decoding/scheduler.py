"""LoPA over blocks: plan a step, pick the winner, fill it, spawn its lookaheads. Host code on small numpy arrays.

One step of one request: open and activate blocks per branch, plan the window (`planning`) -> [forward] -> score the
branches (`confidence`) -> [commit the winner] -> fill it, spawn lookaheads from it (`filling`) -> end it (`ending`).
Every rank of a replica runs this on the same gathered predictions, so all decide alike and no rank has to tell another.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from common.config import DecodeConfig
from common.decoding.blocks import BlockStrategy, block_strategy
from common.decoding.confidence import BRANCH_SCORES, Score
from common.decoding.ending import Ender, FindStop
from common.decoding.filling import Filler, random_numbers
from common.decoding.layout import align, lay_out
from common.decoding.plan import Int, Predictions, Sampling, StepPlan
from common.decoding.planning import Planner
from common.decoding.request import Completion, GenerationRequest
from common.decoding.state import Aligned, DecodingRequest, RequestStep, StepRecord


class Scheduler:
    """Decodes up to `num_slots` requests at once, all of them in every forward pass.

    find_stop: looks for a stop string in the generated ids. observer: sees a StepRecord of every request and step.
    """

    def __init__(
        self,
        decode: DecodeConfig,
        *,
        mask_token_id: int,
        eos_token_id: int | None,
        num_slots: int = 1,
        seed: int = 0,
        find_stop: FindStop | None = None,
        observer: Callable[[StepRecord], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.decode = decode
        self.sampling = Sampling.of(decode, mask_token_id)
        self.active: list[DecodingRequest] = []
        self._strategy: BlockStrategy = block_strategy(decode)
        self._planner = Planner(decode, self._strategy, eos_token_id)
        self._filler = Filler(decode, self._strategy, eos_token_id)
        self._ender = Ender(decode, self._strategy, eos_token_id, find_stop)
        self._seed = seed
        self._free_slots = list(range(num_slots))
        self._prompt_of_slot: list[tuple[int, ...]] = [()] * num_slots  # whose KV a slot still holds
        self._observer = observer
        self._clock = clock
        self._steps: list[RequestStep] = []
        self._aligned: list[Aligned] = []
        self._scores: list[Score] = []

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def admit(self, request: GenerationRequest) -> None:
        """Give the request a slot; its prompt, or what no earlier one left there, is forwarded in the next step."""
        if not request.prompt:
            raise ValueError(f"request {request.id}: the prompt is empty; give at least one token")
        prompt_length = len(request.prompt)
        capacity = prompt_length + self.decode.max_new_tokens
        token_S = np.full(capacity, self.sampling.mask_token_id, dtype=np.int64)
        token_S[:prompt_length] = request.prompt
        slot, num_reused = self._take_slot(request.prompt)  # behind what can raise
        self.active.append(
            DecodingRequest(
                request=request,
                slot=slot,
                noise_key=noise_key(self._seed, request.id),
                token_S=token_S,
                is_masked_S=np.arange(capacity) >= prompt_length,
                blocks=self._strategy.initial_blocks(prompt_length, num_reused),
                admitted_at=self._clock(),
            )
        )

    def plan_step(self) -> StepPlan:
        """Open and activate blocks in every branch, then lay all branches of all requests out as rows."""
        self._steps, first_row = [], 0
        for decoding in self.active:
            step = self._planner.plan_request(decoding, first_row)
            self._steps.append(step)
            first_row = step.end_row
        return lay_out(self._steps, self.decode, self.sampling)

    def select_winners(self, predictions: Predictions) -> Int:
        """The winning row of every request: arg max of its branch scores; the anchor comes last, so it loses ties."""
        self._aligned = [align(step, predictions) for step in self._steps]
        self._scores = [self._score(step, aligned) for step, aligned in zip(self._steps, self._aligned, strict=True)]
        winners = [step.first_row + int(score.argmax()) for step, score in zip(self._steps, self._scores, strict=True)]
        return np.array(winners, dtype=np.int64)

    def advance(self, winner_row_of_request: Int) -> list[Completion]:
        """Turn every winner into the next anchor with its lookaheads; return what is finished and free its slot."""
        now = self._clock()
        finished = []
        for index, step in enumerate(self._steps):
            winner = int(winner_row_of_request[index]) - step.first_row
            self._advance_request(step, self._aligned[index], self._scores[index], winner, now)
            completion = self._ender.completion(step.decoding, now)
            if completion is not None:
                finished.append(completion)
                self.active.remove(step.decoding)
                self._free_slots.append(step.decoding.slot)
        return finished

    def _take_slot(self, prompt: tuple[int, ...]) -> tuple[int, int]:
        """A free slot, and how many positions of the prompt it holds already: whole blocks, never the whole prompt,
        since its last position predicts the first of the canvas."""
        size, choice, num_reused = self.decode.block_size, 0, 0
        if self.decode.reuse_prefix:
            shared = [_num_shared(self._prompt_of_slot[slot], prompt[:-1]) // size * size for slot in self._free_slots]
            num_reused = max(shared)
            choice = shared.index(num_reused)
        slot = self._free_slots.pop(choice)
        self._prompt_of_slot[slot] = prompt
        return slot, num_reused

    def _score(self, step: RequestStep, aligned: Aligned) -> Score:
        decode, decoding = self.decode, step.decoding
        rng = random_numbers(self.decode, decoding, stream=0)
        score_B = BRANCH_SCORES[decode.branch_score](aligned.confidence_BW, step.is_masked_BW, decode, rng)
        if decode.creation_weight == 0:
            return score_B
        created_B = np.array([branch.creation_confidence for branch in decoding.branches])
        return decode.creation_weight * created_B + (1 - decode.creation_weight) * score_B

    def _advance_request(self, step: RequestStep, aligned: Aligned, score_B: Score, winner: int, now: float) -> None:
        decoding = step.decoding
        is_anchor = decoding.branches[winner].position is None
        self._filler.adopt(decoding, decoding.branches[winner])
        fillable = self._strategy.fillable(decoding.blocks)
        position_N, token_N = self._filler.fill(step, aligned, winner, fillable)
        if step.window.commit_length and self.decode.shift_row == "stale":
            column = step.window.next_start - step.window.start
            decoding.carry_31 = aligned.values_3BW[:, winner, column : column + 1].copy()
        decoding.is_refreshed = not self._strategy.settle(decoding.blocks)
        decoding.branches = self._filler.spawn(step, aligned, winner, fillable)
        decoding.num_forwards += 1
        decoding.num_lookahead_wins += not is_anchor
        decoding.tokens_per_step.append(len(position_N) + (not is_anchor))
        if decoding.num_forwards == 1:
            decoding.first_step_s = now - decoding.admitted_at
        if self._observer is not None:
            filled = zip(position_N.tolist(), token_N.tolist(), strict=True)
            self._observer(_record(step, score_B, is_anchor, dict(filled)))


def noise_key(seed: int, request_id: str) -> int:
    """A signed 64-bit key of (seed, request): the same on every rank and in every run."""
    digest = hashlib.blake2b(f"{seed}/{request_id}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = zip(first, second, strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _record(step: RequestStep, score_B: Score, is_anchor: bool, filled: dict[int, int]) -> StepRecord:
    decoding = step.decoding
    return StepRecord(
        request_id=decoding.request.id,
        commit_length=step.window.commit_length,
        window_lengths=[end - step.window.start for end in step.ends],
        branch_scores=score_B.tolist(),
        winner_is_anchor=is_anchor,
        filled=filled,
        lookahead=[
            (branch.position, branch.token, branch.creation_confidence)
            for branch in decoding.branches
            if branch.position is not None
        ],
    )
