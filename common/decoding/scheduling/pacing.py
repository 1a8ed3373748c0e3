"""Which way of decoding brings the most tokens a second at the present load (`pace`).

The time of a pass by its number of tokens is measured before the first request, and what passes of each way take beyond
that is learnt at every load, by rank 0's clock. What a way brings a pass, and what it computes, is learnt from the
requests that were decoded in it from beginning to end. Load is the number of requests under way. Rank 0 tells its
seconds to the other ranks of its replica, so all of it is the same there, and so are the choices.

Shapes: W ways, N requests in a step's order. What has a number a way is a list: arrays of so few take longer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_high

import numpy as np

from common.config import Way
from common.decoding.engine import PassCosts
from common.decoding.plan import Int, Score

_PRIOR_PASSES = 12.0  # weight of what is believed of a way at first, in passes
_MEMORY = 2048.0  # requests of a way after which an observation counts e times less
_EXPLORE_EVERY = 17  # requests for one that tries another way. Odd: kinds of requests may alternate
_EARN = 64  # requests that pay for a trial that takes twice as long as they do
_MOST_CREDIT = 2.0 * _EARN  # requests; a run begins with as many
_HOPE = 1.1  # times the tokens a pass of the best way: what an untried way may bring
_SOME = 1.5  # requests of a way after which half of that hope is left
_LEAST_GAIN = 1.01  # times the tokens a second, for which requests under way change theirs
_REVIEW_EVERY = 8  # steps between two choices at one load
_NUM_LOADS = 16  # powers of two
_TIMED_PASSES = 31  # the last ones of a way at a load, whose median counts
_TRIED_PASSES = 8  # after which a way is no longer hoped to be faster at a load than its costs say
_TRIAL = 0.25  # how much faster, at the most, it is hoped to be until then
_FORGET_EVERY = 2048  # steps after which the pass times of ways that are not in use are forgotten
UNPACED = -1  # in the place of a way
_NOTHING = (0, 0, 0.0)


@dataclass
class _Open:
    """A request under way. is_pinned: the load does not change its way. stays: (way, first step)."""

    way: int
    is_pinned: bool
    first_step: int
    stays: list[tuple[int, int]] = field(default_factory=list)

    def change(self, way: int, step: int) -> None:
        if self.stays and self.stays[-1][1] == step:
            self.stays.pop()
        self.stays.append((way, step))
        self.way = way


class Pacer:
    """costs: of this engine and model.

    num_steps_W: steps of requests in each way so far.
    """

    def __init__(self, ways: Sequence[Way], costs: PassCosts) -> None:
        self.names = tuple(way.name for way in ways)
        self.num_steps_W = np.zeros(len(ways), dtype=np.int64)
        self._costs = costs
        self._learnt = _Learnt(ways)
        self._extra = _ExtraTime(len(ways))
        self._way, self._load, self._step = 0, 0, 0
        self._noted = _NOTHING  # of the last pass that was noted: way, load, seconds expected
        self._num_paced = 0  # requests so far
        self._credit = _MOST_CREDIT  # requests that have not been spent on exploring
        self._open: dict[int, _Open] = {}  # by slot
        self._new: set[int] = set()  # slots of requests that have had no pass
        self._num_pinned = 0

    def admit(self, slot: int, is_paced: bool) -> None:
        """Note a new request. is_paced: the load chooses its way."""
        own = self._open[slot] = _Open(UNPACED, not is_paced, self._step)
        self._new.add(slot)
        if is_paced:
            self._num_paced += 1
            self._credit = min(self._credit + 1, _MOST_CREDIT)
            if self._num_paced % _EXPLORE_EVERY == 0 and (way := self._worth_exploring()) is not None:
                own.is_pinned = True
                own.change(way, self._step)
        self._num_pinned += own.is_pinned

    def turn(self, slot_N: Int) -> list[tuple[int, int]]:
        """Choose for the coming step. Returns slot and way of the requests whose way changes."""
        way = self._way
        if len(slot_N) != self._load or self._step % _REVIEW_EVERY == 0:
            self._load = len(slot_N)
            if self._step % _FORGET_EVERY == 0:
                self._extra.forget(self._load, self._way)
            way = self._best()
        if way == self._way and not self._new:
            return []
        changing = self._open if way != self._way else self._new
        self._way = way
        changed = []
        for slot in changing:
            own = self._open[slot]
            if not own.is_pinned and own.way != way:
                own.change(way, self._step)
                changed.append(slot)
        changed += [slot for slot in self._new if self._open[slot].is_pinned and self._open[slot].way != UNPACED]
        return [(slot, self._open[slot].way) for slot in sorted(changed)]

    def note(self, slot_N: Int, entries_N: Score) -> None:
        """Note how many entries a pass computes of each request."""
        self._step += 1
        load, num_entries = len(slot_N), float(entries_N.sum())
        self._noted = self._way, load, self._expected(num_entries, load)
        if not self._new and not self._num_pinned:
            self.num_steps_W[self._way] += load
            self._learnt.add_entries(self._way, num_entries, load)
            return
        for slot, entries in zip(slot_N.tolist(), entries_N.tolist(), strict=True):
            own = self._open[slot]
            if own.way != UNPACED:
                self.num_steps_W[own.way] += 1
            if slot in self._new:
                self._learnt.add_prompt(entries)
            elif own.way != UNPACED:
                self._learnt.add_entries(own.way, entries, 1)
        self._new.clear()
        if all(own.way == UNPACED for own in self._open.values()):
            self._noted = _NOTHING

    def took(self, seconds: float) -> None:
        """Note how long the pass noted last took, all that came between it and the pass before included."""
        way, load, expected = self._noted
        if load:
            self._extra.add(way, load, seconds - expected)

    def end(self, slot: int, num_tokens: int | None) -> tuple[tuple[str, int], ...]:
        """Note the end of a request and learn from it. Returns its steps by way, in the order in which it took them;
        none where it set its pace itself.

        num_tokens: of its answer; None: it was ended from outside.
        """
        own = self._open.pop(slot)
        self._new.discard(slot)
        self._num_pinned -= own.is_pinned
        stays, num_steps = own.stays, self._step - own.first_step
        if len(stays) == 1 and num_tokens is not None and num_steps:
            self._learnt.add_request(stays[0][0], num_tokens, num_steps)
        ends = [*(first for _, first in stays[1:]), self._step][: len(stays)]
        return tuple((self.names[way], end - first) for (way, first), end in zip(stays, ends, strict=True))

    def tokens_per_s(self, num_requests: int) -> list[float]:
        """Return what so many requests bring together in each way, as far as is known."""
        return self._rates(self._learnt.tokens, num_requests)

    def _best(self) -> int:
        self._learnt.review()
        doubts = self._extra.doubts(self._load)
        rates = [rate * (1 + _TRIAL * doubt) for rate, doubt in zip(self.tokens_per_s(self._load), doubts, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        return best if rates[best] > _LEAST_GAIN * rates[self._way] else self._way

    def _worth_exploring(self) -> int | None:
        """Return the way that might gain the most on the present one for its price, if enough requests have paid for
        it; None until then, and if no way might gain."""
        load = max(self._load, 1)
        hoped, believed = self._rates(self._learnt.hoped, load), self.tokens_per_s(load)
        now = believed[self._way]
        prices = [max(_EARN * (now / own - 1), _EXPLORE_EVERY) for own in believed]
        gains = [0.0 if way == self._way else hoped[way] / now - 1 for way in range(len(hoped))]
        way = max(range(len(gains)), key=lambda way: gains[way] / prices[way])
        if gains[way] <= 0 or prices[way] > self._credit:
            return None
        self._credit -= prices[way]
        return way

    def _rates(self, tokens: Sequence[float], num_requests: int) -> list[float]:
        learnt, rates = self._learnt, []
        extras = self._extra.at(num_requests)
        for brought, computed, extra in zip(tokens, learnt.entries, extras, strict=True):
            first = min(brought / learnt.request_tokens, 1.0)  # the share of passes that compute a prompt
            entries = computed + first * (learnt.prompt_entries - computed)
            expected = self._expected(num_requests * entries, num_requests)
            rates.append(num_requests * brought / max(expected + extra, expected / 2))
        return rates

    def _expected(self, num_entries: float, num_requests: int) -> float:
        return self._costs.at(num_entries) + self._costs.host_s(num_requests)


class _ExtraTime:
    """Seconds that passes take beyond what was expected of them, by way and load: medians, since some passes are
    disturbed. A way that has hardly been tried counts as the others there, a load without a pass as the nearest."""

    def __init__(self, num_ways: int) -> None:
        self._timed = [[deque[float](maxlen=_TIMED_PASSES) for _ in range(num_ways)] for _ in range(_NUM_LOADS)]

    def add(self, way: int, load: int, seconds: float) -> None:
        self._timed[_place(load)][way].append(seconds)

    def at(self, load: int) -> list[float]:
        """Return those of each way at so many requests."""
        place = _place(load)
        nearest = min(range(_NUM_LOADS), key=lambda other: (not any(self._timed[other]), abs(other - place)))
        timed = self._timed[nearest]
        medians = [median_high(own) if own else None for own in timed]
        known = [own for own in medians if own is not None]
        of_all = sum(known) / len(known) if known else 0.0
        return [
            own if own is not None and len(passes) >= _TRIED_PASSES else of_all
            for own, passes in zip(medians, timed, strict=True)
        ]

    def doubts(self, load: int) -> list[float]:
        """Return how little is known of each way at so many requests, from 1 to 0."""
        return [max(1 - len(own) / _TRIED_PASSES, 0.0) for own in self._timed[_place(load)]]

    def forget(self, load: int, but: int) -> None:
        """Forget what passes took at so many requests in other ways than this one."""
        for way, own in enumerate(self._timed[_place(load)]):
            if way != but:
                own.clear()


def _place(load: int) -> int:
    return min(max(load, 1).bit_length(), _NUM_LOADS) - 1


class _Learnt:
    """What passes of each way bring and compute: what was believed, scaled by what has been seen of all ways, until
    enough has been seen of the way itself.

    tokens, entries, hoped: a number a way; `review` brings them up to date. prompt_entries, request_tokens: of a
    request, the mean.
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self.prompt_entries, self.request_tokens = 0.0, 100.0
        self.tokens = self.hoped = self._prior_tokens = [way.tokens for way in ways]
        self.entries = self._prior_entries = [way.entries for way in ways]
        self._tokens, self._passes, self._computed, self._computing, self._requests = (
            [0.0] * len(ways) for _ in range(5)
        )
        self._prompts, self._num_prompts = 0.0, 0.0
        self._is_known = True

    def add_entries(self, way: int, entries: float, num_passes: int) -> None:
        self._computed[way] += entries
        self._computing[way] += num_passes

    def add_prompt(self, entries: float) -> None:
        self._prompts = self._prompts * _KEPT + entries
        self._num_prompts = self._num_prompts * _KEPT + 1
        self.prompt_entries = self._prompts / self._num_prompts

    def add_request(self, way: int, num_tokens: int, num_passes: int) -> None:
        for seen, value in (
            (self._tokens, num_tokens), (self._passes, num_passes), (self._requests, 1),
            (self._computed, 0), (self._computing, 0),
        ):  # fmt: skip
            seen[way] = seen[way] * _KEPT + value
        self.request_tokens += (max(num_tokens, 1) - self.request_tokens) / min(1 + sum(self._requests), _MEMORY)
        self._is_known = False

    def review(self) -> None:
        if self._is_known:
            return
        self.tokens = _believed(self._prior_tokens, self._tokens, self._passes, is_additive=True)
        self.entries = _believed(self._prior_entries, self._computed, self._computing)
        doubts = [1 / (1 + count / _SOME) for count in self._requests]
        # A text that needs no lookaheads brings as much without them.
        most = _HOPE * max(self.tokens)
        self.hoped = [own + doubt * (most - own) for own, doubt in zip(self.tokens, doubts, strict=True)]
        self._is_known = True


_KEPT = math.exp(-1 / _MEMORY)


def _believed(
    priors: Sequence[float], totals: Sequence[float], counts: Sequence[float], *, is_additive: bool = False
) -> list[float]:
    """Return means of what was counted, drawn towards what was believed at first in the proportions of the ways.

    is_additive: where more was seen than that, each way is believed to have as much more: text that is easy without
    lookaheads gains less by them.
    """
    as_believed = _PRIOR_PASSES * sum(priors) / len(priors)
    expected = sum(prior * count for prior, count in zip(priors, counts, strict=True))
    scale = (sum(totals) + as_believed) / (expected + as_believed)
    more = (sum(totals) - expected) / (sum(counts) + _PRIOR_PASSES)
    moved = [prior + more if is_additive and more > 0 else prior * scale for prior in priors]
    return [
        (total + _PRIOR_PASSES * prior) / (count + _PRIOR_PASSES)
        for prior, total, count in zip(moved, totals, counts, strict=True)
    ]
