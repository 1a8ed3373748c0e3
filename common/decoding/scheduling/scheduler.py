"""The scheduler: plan a step, pick the winners, fill them, spawn their lookaheads. Host code on small numpy arrays.

This module decides which requests are decoded, in which slot and by which settings (`rules`); `requests` runs a step.
Every rank of a replica runs it on the same gathered predictions, so all ranks decide alike without messages.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

import numpy as np

from common.config import DecodeConfig, Pace, is_paced, ways_of
from common.constraints import Automaton, Recent
from common.decoding.engine import Capacity, PassCosts, Prefixes, PrefixRoot, Room
from common.decoding.plan import Int, Predictions, Sampling, StepPlan
from common.decoding.request import HOLE, Completion, GenerationRequest, Rejection, TokenLogprob
from common.decoding.scheduling.held import Held
from common.decoding.scheduling.logprobs import Tell
from common.decoding.scheduling.pacing import Pacer
from common.decoding.scheduling.requests import Requests
from common.decoding.scheduling.rules import DREAM, ModelFacts, Rules, StopFinder, no_stop_strings
from common.decoding.scheduling.state import DecodingRequest, Observer, StepRecord
from common.policies import number_of, parsed

# Settings of a whole pass, which all its requests share: attention, and how confidences come out of the logits.
SHARED_SETTINGS = ("window_attention", "sampling_strategy", "mask_token_id", "mask_probability", "temperature_acts_on")
MOST_RULES = 1000  # of different settings that are kept for requests to come


class Scheduler:
    """Decodes up to `num_slots` requests at once, all of them in every forward pass.

    decode, seed: of requests without their own. stop_finder: what looks for stop strings in the generated ids.
    observer: sees a StepRecord of every request and step. pace, costs: requests that leave their pace to the run are
    decoded by the load and by what passes cost; `fixed` needs no costs. max_num_batched_tokens: of prompts in one step;
    None: any number. A longer prompt is cut where that changes nothing (`Rules.chunk`), and begins alone elsewhere.
    facts: of the model. enable_prefix_caching: use KV of earlier requests again, where that changes nothing or the
    settings want it (reuse_prefix).

    num_queried, num_hit: prompt tokens that were looked for in the cache of prefixes, and found.
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
        pace: Pace = "fixed",
        costs: PassCosts | None = None,
        max_num_batched_tokens: int | None = None,
        facts: ModelFacts = DREAM,
        enable_prefix_caching: bool = False,
    ) -> None:
        self.decode = decode
        self.num_slots = num_slots
        self.sampling = Sampling.of(decode, mask_token_id)
        self._eos_token_id = eos_token_id
        self._stop_finder = stop_finder
        self._facts = facts
        self._max_num_batched_tokens = max_num_batched_tokens
        self._pace = pace
        self._rules: dict[DecodeConfig, Rules] = {decode: self._made_rules(decode)}
        self._seed = seed
        self._free_slots = list(range(num_slots))
        self._enable_prefix_caching = enable_prefix_caching
        self._prefixes: Prefixes | None = None
        self._capacity: Capacity | None = None
        self.num_queried = self.num_hit = 0
        self._room_of_slot: dict[int, Room] = {}
        self._failures: dict[str, str] = {}  # of requests that the coming `advance` ends: why
        self.clock = clock
        self._num_begun = 0  # prompt tokens of requests that begin in the coming step
        self._pacer: Pacer | None = None
        if pace != "fixed":
            assert costs is not None, "whoever sets a pace has measured what passes cost"
            self._pacer = Pacer(ways_of(decode, pace), costs)
        self._plan: StepPlan | None = None
        self._closed_of: Recent[tuple[str, tuple[int, ...]], Automaton] = Recent()
        self._requests = Requests(num_slots, self.sampling.mask_token_id)
        self._requests.observer = None if observer is None else Observer(observer)

    @property
    def active(self) -> list[DecodingRequest]:
        """Requests being decoded, in the order in which a step's rows hold them."""
        return self._requests.active

    def observe(self, observer: Callable[[StepRecord], None] | None, ids: Container[str] | None = None) -> None:
        """Have the observer see the steps of the requests with these ids (None: all) from the next step on; None: no
        observer. Requests that are not observed cost nothing more."""
        self._requests.observer = None if observer is None else Observer(observer, ids)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def share(self, prefixes: Prefixes | None, capacity: Capacity) -> None:
        """Take over the prefixes of the engine that decodes what this scheduler plans, before the first request."""
        if prefixes is None:
            return
        prefixes.end_all()
        self._prefixes, self._capacity = prefixes, capacity
        if not self._enable_prefix_caching:
            prefixes.forget()

    def can_begin(self, request: GenerationRequest) -> bool:
        """Return whether the next step has room for the request's prompt beside those that begin with it, and another
        request is not about to leave most of its KV."""
        rules, prompt, num_cached = self._rules_of(request), request.prompt, 0
        root = self._root_of(request, rules.decode)
        if root is not None and self._prefixes is not None:
            if self._prefixes.is_coming(prompt, root):
                return False
            num_cached = self._prefixes.match(prompt, root)
        most = self._max_num_batched_tokens
        if most is None:
            return True
        taken = self._num_begun + self._requests.num_prompt_tokens()
        return not taken or taken + rules.num_first(len(prompt) - num_cached) <= most

    def decode_of(self, request: GenerationRequest) -> DecodeConfig:
        """Return the settings that the request is decoded by."""
        return self.decode if request.decode is None else request.decode

    def admit(self, request: GenerationRequest) -> None:
        """Give the request a slot. The next step forwards its prompt, without the prefix whose KV is there already.

        Raises ValueError for an empty prompt, and for settings that cannot share a pass with the run's.
        """
        if not request.prompt:
            raise ValueError(f"request {request.id}: the prompt is empty; give at least one token")
        rules = self._rules_of(request)
        name = request.id if request.noise_name is None else request.noise_name
        key = noise_key(self._seed if request.seed is None else request.seed, name)
        held = None
        if request.automaton is not None:
            held = Held.of(self._closed(request.automaton, rules), request, rules, key)
        slot = self._free_slots.pop(0)
        self._room_of_slot[slot] = Room(len(request.prompt), rules.decode)
        num_reused = self._claim(slot, request, self._root_of(request, rules.decode))
        self._num_begun += rules.num_first(len(request.prompt) - num_reused)
        if self._pacer is not None:
            self._pacer.admit(slot, bool(rules.ways) and not request.keeps_pace)
        decoding = DecodingRequest(request, rules, slot, key, num_reused, self.clock(), self._failures, held=held)
        try:
            self._requests.add(decoding)
        except Exception:
            self._free(slot, None, is_sound=False)
            raise

    def fail(self, decoding: DecodingRequest, reason: str) -> None:
        """End the request after the step under way, with `reason` as its result."""
        self._failures[decoding.request.id] = reason

    def drop(self, request_id: str) -> Completion | Rejection | None:
        """End a request between two steps with what it has; returns None if it is not being decoded."""
        dropped = self._requests.drop(request_id, self.clock())
        return None if dropped is None else self._freed(*dropped)

    def room_of(self, request: GenerationRequest) -> Room:
        return Room(len(request.prompt), self.decode_of(request))

    def rooms(self) -> list[Room]:
        """Return the rooms of the requests being decoded."""
        return list(self._room_of_slot.values())

    def why_apart(self, decode: DecodeConfig) -> str | None:
        """Return why requests of these settings cannot be decoded beside the run's; None if they can."""
        of_run = _shared(self.decode)
        for name, own in _shared(decode).items():
            if own != of_run[name]:
                shared = of_run[name]
                return f"its {name} {own} cannot share a pass with the run's {shared}; decode it in a run of its own"
        try:
            self._rules_for(decode)
        except ValueError as error:
            return str(error)
        return None

    def asks_for_length(self, request: GenerationRequest) -> bool:
        """Return whether the canvas is cut to the length that its first pass tells (`strategies.survival`)."""
        return self._rules_of(request).survival_margin is not None

    def why_not_held(self, request: GenerationRequest) -> str | None:
        """Return why the request's answer cannot be held to its format; None if it can."""
        if request.automaton is None:
            return None if request.canvas is None else "canvas: it needs an automaton, be it one of any text"
        rules = self._rules_of(request)
        if not rules.end_token_ids:
            return "an answer that is held to a format ends with an end token, and none is known: set eos_token_id"
        of_ends = {dict(request.logit_bias).get(token) for token in rules.end_token_ids}
        if len(of_ends) > 1:
            ends, few = sorted(rules.end_token_ids), 8
            named = ", ".join(map(str, ends[:few])) + (f" and {len(ends) - few} more" if len(ends) > few else "")
            return f"logit_bias: the end tokens {named} count as one: give all of them the same bias, or set min_tokens"
        if request.canvas is not None and (reason := _why_no_canvas(request, request.canvas, rules)) is not None:
            return reason
        if number_of("spawn_rules", rules.decode.spawn_rule, "tokens") > 1:
            return "spawn_rule tries several tokens of a mask, which a format does not judge: leave one of them out"
        if parsed(rules.decode.branch_score)[0] == "exact":
            return "branch_score exact compares what each row predicts alone: leave the format out, or set another"
        carries = rules.shift and not rules.decode.strategy.is_from_zero and rules.decode.shift_row == "stale"
        if request.num_logprobs is not None and carries:
            return (
                "logprobs: this run's model predicts a block's first token in an earlier pass, of which a format, "
                "min_tokens, logit_bias and what is given tell none: leave one of them out, or run with shift_row fresh"
            )
        return None

    def plan_step(self) -> StepPlan:
        """Open blocks in every branch, then lay all branches of all requests out as rows."""
        self._num_begun = 0
        if self._pacer is not None:
            for slot, way in self._pacer.turn(self._requests.slot_N):
                self._requests.take_way(slot, way)
        self._plan = self._requests.plan_step(self.sampling)
        return self._plan

    def look_ahead(self) -> None:
        """Do what `select_winners` would do first and needs no prediction for: to be called while the device computes,
        or not at all."""
        self._requests.look_ahead()

    def select_winners(self, predictions: Predictions) -> Int:
        """Return the winning row of every request: arg max of its branch scores; the anchor comes last, so it loses
        ties."""
        winners = self._requests.select_winners(predictions)
        if self._pacer is not None and self._plan is not None:
            plan = self._plan
            entries_N = np.bincount(plan.request_R, weights=plan.num_entries_R).astype(np.float64)
            self._pacer.note(self._requests.slot_N, entries_N)
        return winners

    def advance(self, winner_row_of_request: Int, tell: Tell | None = None) -> list[Completion | Rejection]:
        """Turn every winner into the next anchor with its lookaheads. Returns the requests that have ended, and frees
        their slots. tell: gives the log probabilities of requests that ask for them."""
        ended = [self._freed(*ended) for ended in self._requests.advance(winner_row_of_request, self.clock(), tell)]
        failed = [self.drop(request_id) for request_id in [*self._failures]]
        return [*ended, *(result for result in failed if result is not None)]

    def took(self, seconds: float) -> None:
        """Note how long the last pass took, from the end of the one before it: rank 0's seconds, on every rank."""
        if self._pacer is not None:
            self._pacer.took(seconds)

    def steps_by_way(self) -> dict[str, int]:
        """Return the steps of requests in each way of the run's pace so far; none where it is `fixed`."""
        pacer = self._pacer
        return {} if pacer is None else dict(zip(pacer.names, pacer.num_steps_W.tolist(), strict=True))

    def newly_final(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return, by id of requests that go on, tokens that can no longer change and that no earlier call returned."""
        return self._requests.newly_final()

    def logprobs(self, request_id: str, begin: int, end: int) -> tuple[TokenLogprob, ...]:
        """Return the log probabilities of tokens [begin, end) of an answer that goes on; () where none are asked
        for."""
        return self._requests.logprobs(request_id, begin, end)

    def _rules_of(self, request: GenerationRequest) -> Rules:
        decode = self.decode_of(request)
        if decode not in self._rules and (reason := self.why_apart(decode)) is not None:
            raise ValueError(f"request {request.id}: {reason}")
        return self._rules_for(decode)

    def _rules_for(self, decode: DecodeConfig) -> Rules:
        """Return the rules of these settings. Raises ValueError for stop strings without a tokenizer."""
        rules = self._rules.get(decode)
        if rules is None:
            if len(self._rules) >= MOST_RULES:  # of requests that have ended, mostly
                self._rules = {self.decode: self._rules[self.decode]}
            rules = self._rules[decode] = self._made_rules(decode)
        return rules

    def _made_rules(self, decode: DecodeConfig) -> Rules:
        def of(own: DecodeConfig) -> Rules:
            return Rules.of(own, self._eos_token_id, self._stop_finder, self._facts, self._max_num_batched_tokens)

        if not is_paced(decode, self.decode):
            return of(decode)
        return replace(of(decode), ways=tuple(of(way.decode) for way in ways_of(decode, self._pace)))

    def _closed(self, automaton: Automaton, rules: Rules) -> Automaton:
        """Return the automaton of canvases; one object of equal ones, so that an engine prepares it once."""
        ends = tuple(sorted(rules.end_token_ids))
        found = self._closed_of.get((automaton.key, ends))
        if found is None:
            found = automaton.closed(ends)
            self._closed_of.keep((automaton.key, ends), found, found.num_bytes)
        return found

    def _freed(self, decoding: DecodingRequest, completion: Completion) -> Completion | Rejection:
        reason = self._failures.pop(completion.id, None)
        num_tokens = None if completion.finish_reason == "abort" else completion.num_effective_tokens
        ways = self._free(decoding.slot, num_tokens, is_sound=reason is None)  # else its KV may hold what is no number
        return replace(completion, ways=ways) if reason is None else Rejection(completion.id, reason, "error")

    def _free(self, slot: int, num_tokens: int | None, *, is_sound: bool) -> tuple[tuple[str, int], ...]:
        """Free the slot, and return the ways that its request was decoded in. num_tokens: those of the answer; None:
        it has not ended by itself. is_sound: others may use its KV."""
        self._free_slots.append(slot)
        del self._room_of_slot[slot]
        if self._prefixes is not None:
            self._prefixes.end(slot, is_sound=is_sound)
        return () if self._pacer is None else self._pacer.end(slot, num_tokens)

    def _claim(self, slot: int, request: GenerationRequest, root: PrefixRoot | None) -> int:
        """Return of how many positions of the prompt the slot has KV from now on."""
        if self._prefixes is None or self._capacity is None:
            return 0
        num_reused = self._prefixes.claim(slot, request.prompt, root, self._capacity.num_spare(self.rooms()))
        if root is not None:
            self.num_queried += len(request.prompt)
            self.num_hit += num_reused
        return num_reused

    def _root_of(self, request: GenerationRequest, decode: DecodeConfig) -> PrefixRoot | None:
        """Return what the request shares its prompt's KV with; None: with nothing, since that depends on what comes
        after it."""
        strategy, salt = decode.strategy, request.cache_salt or ""
        if not self._enable_prefix_caching:
            return None
        if strategy.is_from_zero and strategy.cached != "none":
            return PrefixRoot(decode.block_size, salt)
        return PrefixRoot(1, salt, is_exact=False) if strategy.reuses_prefix else None


def _shared(decode: DecodeConfig) -> dict[str, Any]:
    """Return the settings that requests of one pass must have in common, by name."""
    strategy = decode.strategy
    found = {name: getattr(decode, name) for name in SHARED_SETTINGS}
    found["spawn_rule's tokens"] = int(number_of("spawn_rules", decode.spawn_rule, "tokens"))
    return {**found, "cfg_scale": strategy.guidance, "penalty_lambda": strategy.penalty}


def noise_key(seed: int, name: str) -> int:
    """Return a signed 64-bit key of (seed, request's name), the same on every rank and in every run."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _why_no_canvas(request: GenerationRequest, canvas: tuple[int, ...], rules: Rules) -> str | None:
    if len(canvas) > rules.decode.max_new_tokens:
        return f"canvas: its {len(canvas)} tokens are more than max_new_tokens {rules.decode.max_new_tokens}: raise it"
    ends = rules.end_token_ids.intersection(canvas)
    if ends:
        return f"a text that is given holds the token {min(ends)}, which ends an answer: leave it out"
    if request.num_logprobs is not None and any(token != HOLE for token in canvas[: request.max_tokens]):
        return "logprobs: tokens of a canvas that are given were not predicted: leave one of them out"
    return None
