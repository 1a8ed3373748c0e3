"""Which way of decoding brings the most tokens a second at the present load (`pace`).

The time of a pass by its number of tokens is measured before the first request. What a way brings a pass, and what it
computes, is learnt from the requests that were decoded in it from beginning to end. Load is the number of requests
under way. All of it is the same on every rank of a replica, and so are the choices, without messages.

Shapes: W ways, N requests in a step's order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.config import Way
from common.decoding.engine import PassCosts
from common.decoding.plan import Int, Score

_PRIOR_PASSES = 100.0  # that what is believed of a way at first counts as
_MEMORY = 2048.0  # requests of a way after which an observation counts e times less
_EXPLORE_EVERY = 32  # requests: then one is decoded in the way that might be the best
_HOPE = 0.5  # how much better than believed a way may be that nobody has seen
_LEAST_GAIN = 1.01  # for which requests under way change theirs
UNPACED = -1  # in the place of a way


class Pacer:
    """costs: of this engine and model.

    num_steps_W: steps of requests in each way so far.
    """

    def __init__(self, ways: Sequence[Way], costs: PassCosts, num_slots: int) -> None:
        self.names = tuple(way.name for way in ways)
        self.num_steps_W = np.zeros(len(ways), dtype=np.int64)
        self._costs = costs
        self._learnt = _Learnt(ways)
        self._way, self._load = 0, 0  # those of the last step
        self._num_admitted = 0
        self._way_of_slot = np.full(num_slots, UNPACED)
        self._is_pinned = np.zeros(num_slots, dtype=np.bool_)
        self._stays_of_slot: list[list[tuple[int, int]]] = [[] for _ in range(num_slots)]  # (way, first step)
        self._num_steps_of_slot = np.zeros(num_slots, dtype=np.int64)

    def admit(self, slot: int, is_paced: bool) -> None:
        """Note a new request. is_paced: the load chooses its way."""
        self._way_of_slot[slot] = UNPACED
        self._num_steps_of_slot[slot] = 0
        self._is_pinned[slot] = not is_paced
        self._stays_of_slot[slot] = []
        if is_paced:
            self._num_admitted += 1
            if self._num_admitted % _EXPLORE_EVERY == 0:
                self._is_pinned[slot] = True
                self._change(slot, self._most_hopeful())

    def turn(self, slot_N: Int) -> list[tuple[int, int]]:
        """Choose for the coming step. Returns slot and way of the requests whose way changes."""
        if len(slot_N) != self._load or self._learnt.has_changed:
            self._load = len(slot_N)
            self._way = self._best()
        changing_N = slot_N[~self._is_pinned[slot_N] & (self._way_of_slot[slot_N] != self._way)]
        for slot in changing_N.tolist():
            self._change(slot, self._way)
        new_N = slot_N[(self._num_steps_of_slot[slot_N] == 0) & (self._way_of_slot[slot_N] != UNPACED)]
        return [(slot, int(self._way_of_slot[slot])) for slot in sorted({*changing_N.tolist(), *new_N.tolist()})]

    def note(self, slot_N: Int, entries_N: Score) -> None:
        """Note how many entries a pass computes of each request."""
        way_N, is_first_N = self._way_of_slot[slot_N], self._num_steps_of_slot[slot_N] == 0
        self._num_steps_of_slot[slot_N] += 1
        is_paced_N = way_N != UNPACED
        self.num_steps_W += np.bincount(way_N[is_paced_N], minlength=len(self.names))
        self._learnt.add_entries(way_N[is_paced_N & ~is_first_N], entries_N[is_paced_N & ~is_first_N])
        if is_first_N.any():
            self._learnt.add_prompts(entries_N[is_first_N])

    def end(self, slot: int, num_tokens: int | None) -> tuple[tuple[str, int], ...]:
        """Note the end of a request and learn from it. Returns its steps by way, in the order in which it took them;
        none where it set its pace itself.

        num_tokens: of its answer; None: it was ended from outside.
        """
        stays, num_steps = self._stays_of_slot[slot], int(self._num_steps_of_slot[slot])
        if len(stays) == 1 and num_tokens is not None and num_steps:
            self._learnt.add_request(stays[0][0], num_tokens, num_steps)
        ends = [*(first for _, first in stays[1:]), num_steps][: len(stays)]
        return tuple((self.names[way], end - first) for (way, first), end in zip(stays, ends, strict=True))

    def tokens_per_s(self, num_requests: int) -> Score:
        """[W]: what so many requests bring together in each way, as far as is known."""
        return self._rate(self._learnt.tokens_W, num_requests)

    def _best(self) -> int:
        rate_W = self.tokens_per_s(self._load)
        self._learnt.has_changed = False
        best = int(rate_W.argmax())
        is_worth_it = rate_W[best] > _LEAST_GAIN * rate_W[self._way]
        return best if is_worth_it else self._way

    def _most_hopeful(self) -> int:
        return int(self._rate(self._learnt.hoped_W, max(self._load, 1)).argmax())

    def _rate(self, tokens_W: Score, num_requests: int) -> Score:
        learnt = self._learnt
        entries_W = learnt.entries_W + learnt.prompt_entries * tokens_W / learnt.request_tokens
        seconds_W = self._costs.at(num_requests * entries_W) + self._costs.host_s(num_requests)
        rate_W: Score = num_requests * tokens_W / seconds_W
        return rate_W

    def _change(self, slot: int, way: int) -> None:
        self._way_of_slot[slot] = way
        step, stays = int(self._num_steps_of_slot[slot]), self._stays_of_slot[slot]
        if stays and stays[-1][1] == step:
            stays.pop()
        stays.append((way, step))


class _Learnt:
    """What passes of each way bring and compute: what was believed, scaled by what has been seen of all ways, until
    enough has been seen of the way itself.

    prompt_entries, request_tokens: of a request, the mean.
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self.has_changed = False
        self.prompt_entries, self.request_tokens = 0.0, 100.0
        self.tokens_W = self.hoped_W = self._prior_tokens_W = np.array([way.tokens for way in ways])
        self.entries_W = self._prior_entries_W = np.array([way.entries for way in ways])
        self._tokens_W, self._passes_W = np.zeros(len(ways)), np.zeros(len(ways))
        self._computed_W, self._computing_W = np.zeros(len(ways)), np.zeros(len(ways))
        self._num_requests_W = np.zeros(len(ways))
        self._prompts, self._num_prompts = 0.0, 0.0

    def add_entries(self, way_N: Int, entries_N: Score) -> None:
        num_ways = len(self.tokens_W)
        self._computed_W += np.bincount(way_N, weights=entries_N, minlength=num_ways)
        self._computing_W += np.bincount(way_N, minlength=num_ways)

    def add_prompts(self, entries_N: Score) -> None:
        kept = np.exp(-len(entries_N) / _MEMORY)
        self._prompts = self._prompts * kept + entries_N.sum()
        self._num_prompts = self._num_prompts * kept + len(entries_N)
        self.prompt_entries = self._prompts / self._num_prompts

    def add_request(self, way: int, num_tokens: int, num_passes: int) -> None:
        kept = np.exp(-1 / _MEMORY)
        for seen_W, value in (
            (self._tokens_W, num_tokens), (self._passes_W, num_passes), (self._num_requests_W, 1),
            (self._computed_W, 0), (self._computing_W, 0),
        ):  # fmt: skip
            seen_W[way] = seen_W[way] * kept + value
        self.request_tokens += (max(num_tokens, 1) - self.request_tokens) / min(1 + self._num_requests_W.sum(), _MEMORY)
        self.tokens_W = _believed(self._prior_tokens_W, self._tokens_W, self._passes_W)
        self.entries_W = _believed(self._prior_entries_W, self._computed_W, self._computing_W)
        doubt_W = 1 / np.sqrt(1 + self._num_requests_W)
        might_W = self.tokens_W + doubt_W * np.maximum(self._prior_tokens_W - self.tokens_W, 0)
        self.hoped_W = might_W * (1 + _HOPE * doubt_W)
        self.has_changed = True


def _believed(prior_W: Score, total_W: Score, count_W: Score) -> Score:
    """Return means of what was counted, drawn towards what was believed at first in the proportions of the ways."""
    as_believed = _PRIOR_PASSES * prior_W.mean()
    scale = (total_W.sum() + as_believed) / ((prior_W * count_W).sum() + as_believed)
    found_W: Score = (total_W + _PRIOR_PASSES * scale * prior_W) / (count_W + _PRIOR_PASSES)
    return found_W
