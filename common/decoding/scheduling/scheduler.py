"""LoPA over blocks: plan a step, pick the winner, fill it, spawn its lookaheads. Host code on small numpy arrays.

One step of one request: open and activate blocks per branch, plan the window (`planning`) -> [forward] -> score the
branches (`confidence`) -> [commit the winner] -> fill it, spawn lookaheads from it (`filling`) -> end it (`ending`).
Each request is decoded by its own settings (`rules`).
Every rank of a replica runs this on the same gathered predictions, so all decide alike and no rank has to tell another.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from common.config import DecodeConfig
from common.decoding.engine import Room
from common.decoding.plan import Int, Predictions, Sampling, StepPlan
from common.decoding.request import Completion, GenerationRequest
from common.decoding.scheduling.confidence import BRANCH_SCORES, Score
from common.decoding.scheduling.ending import completion_of
from common.decoding.scheduling.filling import adopt, fill, random_numbers, spawn
from common.decoding.scheduling.layout import align, lay_out
from common.decoding.scheduling.planning import plan_request
from common.decoding.scheduling.rules import Rules, StopFinder, no_stop_strings
from common.decoding.scheduling.state import Aligned, DecodingRequest, RequestStep, StepRecord

# Of a whole pass, which requests share: what attends to what, and how a token comes out of the logits.
SHARED_SETTINGS = ("window_attention", "sampling_strategy", "temperature", "top_p", "top_k", "mask_token_id")


class Scheduler:
    """Decodes up to `num_slots` requests at once, all of them in every forward pass.

    decode, seed: of requests without their own. stop_finder: what looks for stop strings in the generated ids.
    observer: sees a StepRecord of every request and step.
    """

    def __init__(
        self,
        decode: DecodeConfig,
        *,
        mask_token_id: int,
        eos_token_id: int | None,
        num_slots: int = 1,
        seed: int = 0,
        stop_finder: StopFinder = no_stop_strings,
        observer: Callable[[StepRecord], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.decode = decode
        self.num_slots = num_slots
        self.sampling = Sampling.of(decode, mask_token_id)
        self.active: list[DecodingRequest] = []
        self._eos_token_id = eos_token_id
        self._stop_finder = stop_finder
        self._rules: dict[DecodeConfig, Rules] = {decode: Rules.of(decode, eos_token_id, stop_finder)}
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

    def decode_of(self, request: GenerationRequest) -> DecodeConfig:
        """The settings that the request is decoded by."""
        return self.decode if request.decode is None else request.decode

    def admit(self, request: GenerationRequest) -> None:
        """Give the request a slot; its prompt, or what no earlier one left there, is forwarded in the next step.

        Raises ValueError for an empty prompt, and for settings that cannot share a pass with the run's.
        """
        if not request.prompt:
            raise ValueError(f"request {request.id}: the prompt is empty; give at least one token")
        rules = self._rules_of(request)
        prompt_length = len(request.prompt)
        capacity = prompt_length + rules.decode.max_new_tokens
        token_S = np.full(capacity, self.sampling.mask_token_id, dtype=np.int64)
        token_S[:prompt_length] = request.prompt
        slot, num_reused = self._take_slot(request.prompt, rules.decode)  # behind what can raise
        self.active.append(
            DecodingRequest(
                request=request,
                rules=rules,
                slot=slot,
                noise_key=noise_key(self._seed if request.seed is None else request.seed, request.id),
                token_S=token_S,
                is_masked_S=np.arange(capacity) >= prompt_length,
                blocks=rules.strategy.initial_blocks(prompt_length, num_reused),
                admitted_at=self._clock(),
            )
        )

    def drop(self, request_id: str) -> Completion | None:
        """End a request between two steps with what it has; None: it is not being decoded."""
        decoding = next((decoding for decoding in self.active if decoding.request.id == request_id), None)
        if decoding is None:
            return None
        self._remove(decoding)
        return completion_of(decoding, self._clock(), "abort")

    def room_of(self, request: GenerationRequest) -> Room:
        return Room(len(request.prompt), self.decode_of(request))

    def rooms(self) -> list[Room]:
        """Of the requests being decoded."""
        return [Room(decoding.prompt_length, decoding.rules.decode) for decoding in self.active]

    def why_apart(self, decode: DecodeConfig) -> str | None:
        """Why requests of these settings cannot share a pass with the run's; None: they can."""
        for name in SHARED_SETTINGS:
            own, shared = getattr(decode, name), getattr(self.decode, name)
            if own != shared:
                return f"its {name} {own} cannot share a pass with the run's {shared}; decode it in a run of its own"
        return None

    def plan_step(self) -> StepPlan:
        """Open and activate blocks in every branch, then lay all branches of all requests out as rows."""
        self._steps, first_row = [], 0
        for decoding in self.active:
            step = plan_request(decoding, first_row)
            self._steps.append(step)
            first_row = step.end_row
        return lay_out(self._steps, self.sampling)

    def select_winners(self, predictions: Predictions) -> Int:
        """The winning row of every request: arg max of its branch scores; the anchor comes last, so it loses ties."""
        self._aligned = align(self._steps, predictions)
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
            completion = completion_of(step.decoding, now)
            if completion is not None:
                finished.append(completion)
                self._remove(step.decoding)
        return finished

    def _rules_of(self, request: GenerationRequest) -> Rules:
        decode = self.decode_of(request)
        rules = self._rules.get(decode)
        if rules is None:
            if (reason := self.why_apart(decode)) is not None:
                raise ValueError(f"request {request.id}: {reason}")
            rules = self._rules[decode] = Rules.of(decode, self._eos_token_id, self._stop_finder)
        return rules

    def _remove(self, decoding: DecodingRequest) -> None:
        self.active.remove(decoding)
        self._free_slots.append(decoding.slot)

    def _take_slot(self, prompt: tuple[int, ...], decode: DecodeConfig) -> tuple[int, int]:
        """A free slot, and how many positions of the prompt it holds already: whole blocks, never the whole prompt,
        since its last position predicts the first of the canvas."""
        size, choice, num_reused = decode.block_size, 0, 0
        if decode.reuse_prefix:
            shared = [_num_shared(self._prompt_of_slot[slot], prompt[:-1]) // size * size for slot in self._free_slots]
            num_reused = max(shared)
            choice = shared.index(num_reused)
        slot = self._free_slots.pop(choice)
        self._prompt_of_slot[slot] = prompt
        return slot, num_reused

    def _score(self, step: RequestStep, aligned: Aligned) -> Score:
        decoding = step.decoding
        decode, rng = decoding.rules.decode, random_numbers(decoding, stream=0)
        score_B = BRANCH_SCORES[decode.branch_score](aligned.confidence_BW, step.is_masked_BW, decode, rng)
        if decode.creation_weight == 0:
            return score_B
        created_B = np.array([branch.creation_confidence for branch in decoding.branches])
        return decode.creation_weight * created_B + (1 - decode.creation_weight) * score_B

    def _advance_request(self, step: RequestStep, aligned: Aligned, score_B: Score, winner: int, now: float) -> None:
        decoding = step.decoding
        is_anchor = decoding.branches[winner].position is None
        adopt(decoding, decoding.branches[winner])
        strategy = decoding.rules.strategy
        fillable = strategy.fillable(decoding.blocks)
        position_N, token_N = fill(step, aligned, winner, fillable)
        if step.window.commit_length and decoding.rules.decode.shift_row == "stale":
            column = step.window.next_start - step.window.start
            decoding.carry_31 = aligned.values_3BW[:, winner, column : column + 1].copy()
        decoding.is_refreshed = not strategy.settle(decoding.blocks)
        decoding.branches = spawn(step, aligned, winner, fillable)
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
