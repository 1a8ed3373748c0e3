"""LoPA over blocks: plan a step, pick the winner, fill it, spawn its lookaheads. Host code on small numpy arrays.

One step of one request (design 1.2): open and activate blocks per branch -> plan the window -> [forward] -> score the
branches -> [commit the winner] -> fill it -> move its full blocks -> spawn lookaheads from it. Every rank of a
replica runs this on the same gathered predictions, so all of them decide alike and no rank has to tell another.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from common.blocks import Block, BlockStatus, BlockStrategy, block_strategy
from common.confidence import BRANCH_SCORES, Score, spawn_order
from common.config import DecodeConfig
from common.layout import align, lay_out, shift_entries
from common.plan import Int, Predictions, Sampling, StepPlan
from common.request import Completion, FinishReason, GenerationRequest
from common.state import Aligned, Branch, DecodingRequest, RequestStep, StepRecord

FindStop = Callable[[Sequence[int]], "int | None"]  # generated ids so far -> how many of them to keep, or None
_NO_RANDOMNESS = np.random.default_rng(0)
_NOTHING = np.empty(0, dtype=np.int64)


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
        self.sampling = Sampling(
            decode.sampling_strategy, mask_token_id, decode.temperature, decode.top_p, decode.top_k
        )
        self.active: list[DecodingRequest] = []
        self._strategy: BlockStrategy = block_strategy(decode)
        self._eos_token_id = eos_token_id
        self._seed = seed
        self._free_slots = list(range(num_slots))
        self._prompt_of_slot: list[tuple[int, ...]] = [()] * num_slots  # whose KV a slot still holds
        self._find_stop = find_stop
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
        slot, num_reused = self._take_slot(request.prompt)
        prompt_length = len(request.prompt)
        capacity = prompt_length + self.decode.max_new_tokens
        token_S = np.full(capacity, self.sampling.mask_token_id, dtype=np.int64)
        token_S[:prompt_length] = request.prompt
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
            step = self._plan_request(decoding, first_row)
            self._steps.append(step)
            first_row = step.last_row
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
        for place, step in enumerate(self._steps):
            winner = int(winner_row_of_request[place]) - step.first_row
            self._advance_request(step, self._aligned[place], self._scores[place], winner, now)
            completion = self._completion(step.decoding, now)
            if completion is not None:
                finished.append(completion)
                self.active.remove(step.decoding)
                self._free_slots.append(step.decoding.slot)
        return finished

    def _take_slot(self, prompt: tuple[int, ...]) -> tuple[int, int]:
        """A free slot, and how many positions of the prompt it holds already: whole blocks, never the whole prompt,
        since its last position predicts the first of the canvas."""
        size, place, num_reused = self.decode.block_size, 0, 0
        if self.decode.reuse_prefix:
            shared = [_num_shared(self._prompt_of_slot[slot], prompt[:-1]) // size * size for slot in self._free_slots]
            num_reused = max(shared)
            place = shared.index(num_reused)
        slot = self._free_slots.pop(place)
        self._prompt_of_slot[slot] = prompt
        return slot, num_reused

    def _plan_request(self, decoding: DecodingRequest, first_row: int) -> RequestStep:
        self._open_and_activate(decoding)
        window = self._strategy.window(decoding.blocks, decoding.is_refreshed)
        ends = [window.end] * len(decoding.branches)
        if any(branch.opens_block for branch in decoding.branches):
            own_end, window = window.end, window.until(self._strategy.new_block(decoding.blocks).end)
            ends = [window.end if branch.opens_block else own_end for branch in decoding.branches]
        start = window.start
        is_masked_BW = np.empty((len(ends), window.end - start), dtype=np.bool_)
        is_masked_BW[:] = decoding.is_masked_S[start : window.end]
        for index, (branch, end) in enumerate(zip(decoding.branches, ends, strict=True)):
            if branch.position is not None:
                is_masked_BW[index, branch.position - start] = False
            if end < window.end:
                is_masked_BW[index, end - start :] = False
        starts = shift_entries(start, window.end, decoding.prompt_length, decoding.is_masked_S, self.decode)
        places = {block_start: place for place, block_start in enumerate(starts)}
        return RequestStep(decoding, first_row, first_row + len(ends), window, ends, is_masked_BW, places)

    def _open_and_activate(self, decoding: DecodingRequest) -> None:
        """Each branch by its own filled shares, its lookahead token included."""
        blocks, threshold = decoding.blocks, self.decode.decoded_token_threshold
        shares = [block.filled_share for block in blocks]
        waiting = [index for index in range(1, len(blocks)) if not blocks[index].is_fully_activated]
        for branch in decoding.branches:
            own, has_eos = shares, decoding.has_eos
            if branch.position is not None:
                place = decoding.block_index_at(branch.position)
                block, own = blocks[place], shares.copy()
                own[place] = 1.0 - (block.num_masked - 1) / (block.end - block.start)
                has_eos = has_eos or branch.token == self._eos_token_id
            branch.opens_block = not has_eos and self._strategy.opens_block(blocks, own[-1])
            branch.activated = tuple([index for index in waiting if own[index - 1] >= threshold])
            if branch.opens_block and own[-1] >= threshold:
                branch.activated += (len(blocks),)

    def _score(self, step: RequestStep, aligned: Aligned) -> Score:
        decode, decoding = self.decode, step.decoding
        rng = self._rng(decoding, stream=0)
        score_B = BRANCH_SCORES[decode.branch_score](aligned.confidence_BW, step.is_masked_BW, decode, rng)
        if decode.creation_weight == 0:
            return score_B
        created_B = np.array([branch.creation_confidence for branch in decoding.branches])
        return decode.creation_weight * created_B + (1 - decode.creation_weight) * score_B

    def _advance_request(self, step: RequestStep, aligned: Aligned, score_B: Score, winner: int, now: float) -> None:
        decoding = step.decoding
        is_anchor = decoding.branches[winner].position is None
        self._adopt(decoding, decoding.branches[winner])
        fillable = self._strategy.fillable(decoding.blocks)
        position_N, token_N = self._fill(step, aligned, winner, fillable)
        if step.window.commit_length and self.decode.shift_row == "stale":
            place = step.window.next_start - step.window.start
            decoding.carry_31 = aligned.values_3BW[:, winner, place : place + 1].copy()
        decoding.is_refreshed = not self._strategy.settle(decoding.blocks)
        decoding.branches = self._spawn(step, aligned, winner, fillable)
        decoding.num_forwards += 1
        decoding.num_lookahead_wins += not is_anchor
        decoding.tokens_per_step.append(len(position_N) + (not is_anchor))
        if decoding.num_forwards == 1:
            decoding.first_step_s = now - decoding.admitted_at
        if self._observer is not None:
            filled = zip(position_N.tolist(), token_N.tolist(), strict=True)
            self._observer(_record(step, score_B, is_anchor, dict(filled)))

    def _adopt(self, decoding: DecodingRequest, branch: Branch) -> None:
        """The winner becomes the anchor: the block it opened, its activations and its token."""
        if branch.opens_block:
            decoding.blocks.append(self._strategy.new_block(decoding.blocks))
        for index in branch.activated:
            decoding.blocks[index].is_fully_activated = True
        if branch.position is not None:
            decoding.blocks[decoding.block_index_at(branch.position)].num_masked -= 1
            decoding.token_S[branch.position] = branch.token
            decoding.is_masked_S[branch.position] = False
            decoding.has_eos = decoding.has_eos or branch.token == self._eos_token_id

    def _fill(self, step: RequestStep, aligned: Aligned, winner: int, fillable: list[Block]) -> tuple[Int, Int]:
        """Fill every mask above tau_conf; a fully activated block without one fills its most confident mask. The
        positions filled, and their tokens."""
        decoding = step.decoding
        if not fillable:
            return _NOTHING, _NOTHING
        start, offset = fillable[0].start, fillable[0].start - step.window.start
        is_masked_C = decoding.is_masked_S[start : fillable[-1].end]
        columns = slice(offset, offset + len(is_masked_C))
        is_chosen_C = aligned.probability_BW[winner, columns] > self.decode.skip_threshold
        is_chosen_C &= is_masked_C
        for block in fillable:
            if block.num_masked:
                is_chosen_N = is_chosen_C[block.start - start : block.end - start]
                num_chosen = int(np.count_nonzero(is_chosen_N))
                if not num_chosen and block.is_fully_activated:
                    masked_N = is_masked_C[block.start - start : block.end - start].nonzero()[0]
                    confidence_N = aligned.confidence_BW[winner, masked_N + (block.start - step.window.start)]
                    is_chosen_N[masked_N[confidence_N.argmax()]] = True
                    num_chosen = 1
                block.num_masked -= num_chosen
        chosen_N = is_chosen_C.nonzero()[0]
        position_N, token_N = chosen_N + start, aligned.tokens(winner, chosen_N + offset)
        decoding.token_S[position_N] = token_N
        is_masked_C[chosen_N] = False
        decoding.has_eos = decoding.has_eos or self._eos_token_id in token_N.tolist()
        return position_N, token_N

    def _spawn(self, step: RequestStep, aligned: Aligned, winner: int, fillable: list[Block]) -> list[Branch]:
        """Up to k lookaheads, each the anchor plus one more of its remaining masks; then the anchor."""
        decoding, start = step.decoding, step.window.start
        masked = [block for block in fillable if block.num_masked]
        if self.decode.spawn_blocks == "first":
            masked = masked[:1]
        if not masked or self.decode.num_lookahead == 0:
            return [Branch()]
        offset = masked[0].start - start
        # What lies between the first and the last of these blocks is full.
        candidate_C = decoding.is_masked_S[masked[0].start : masked[-1].end].nonzero()[0] + offset
        confidence_C = aligned.confidence_BW[winner].take(candidate_C)
        rng = self._rng(decoding, stream=1)
        order_K = spawn_order(self.decode.spawn_rule, confidence_C, self.decode.num_lookahead, rng)
        chosen_K = candidate_C[order_K]
        columns = (
            (chosen_K + start).tolist(),
            aligned.tokens(winner, chosen_K).tolist(),
            confidence_C[order_K].tolist(),
        )
        return [Branch(*column) for column in zip(*columns, strict=True)] + [Branch()]

    def _rng(self, decoding: DecodingRequest, stream: int) -> np.random.Generator:
        if "random" not in (self.decode.branch_score, self.decode.spawn_rule):
            return _NO_RANDOMNESS
        return np.random.default_rng((decoding.noise_key % 2**63, decoding.num_forwards, stream))

    def _completion(self, decoding: DecodingRequest, now: float) -> Completion | None:
        """The finished request, or None while it goes on."""
        may_end_early = decoding.has_eos or self._find_stop is not None
        if not (may_end_early or self._is_done(decoding) or self._is_out_of_steps(decoding)):
            return None
        generated = decoding.token_S[decoding.prompt_length : decoding.blocks[-1].end]
        is_masked = decoding.is_masked_S[decoding.prompt_length : decoding.blocks[-1].end]
        num_filled_prefix = int(is_masked.argmax()) if is_masked.any() else len(generated)
        num_kept, reason = self._find_end(decoding, generated[:num_filled_prefix])
        if reason is None:
            return None
        return Completion(
            id=decoding.request.id,
            prompt_length=decoding.prompt_length,
            token_ids=tuple(generated[:num_kept].tolist()),
            canvas_token_ids=tuple(generated.tolist()),
            num_canvas_tokens=int((~is_masked).sum()),
            num_forwards=decoding.num_forwards,
            num_lookahead_wins=decoding.num_lookahead_wins,
            finish_reason=reason,
            first_step_s=decoding.first_step_s,
            total_s=now - decoding.admitted_at,
            tokens_per_step=tuple(decoding.tokens_per_step),
        )

    def _find_end(self, decoding: DecodingRequest, prefix: Int) -> tuple[int, FinishReason | None]:
        """How much of the filled prefix is the answer, and why the request ends, if it does."""
        eos_at = np.flatnonzero(prefix == self._eos_token_id)[:1] if decoding.has_eos else prefix[:0]
        num_kept = int(eos_at[0]) + 1 if eos_at.size else len(prefix)
        if self._find_stop is not None:
            stop_at = self._find_stop(prefix[:num_kept].tolist())
            if stop_at is not None:
                return stop_at, "stop"
        if eos_at.size and self.decode.stop_at_eos:
            return num_kept, "eos"
        if self._is_done(decoding):
            return num_kept, "eos" if eos_at.size else "length"
        if self._is_out_of_steps(decoding):
            return num_kept, "max_steps"
        return num_kept, None

    def _is_done(self, decoding: DecodingRequest) -> bool:
        """No mask left, no block active, and none to open."""
        if any(block.num_masked or block.status is BlockStatus.ACTIVE for block in decoding.blocks):
            return False
        return decoding.has_eos or not self._strategy.opens_block(decoding.blocks, last_filled_share=1.0)

    def _is_out_of_steps(self, decoding: DecodingRequest) -> bool:
        return decoding.num_forwards >= (self.decode.max_steps or 2 * self.decode.max_new_tokens + 16)


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
