"""Places dealt out to whoever asks: each once, and who has the harder work takes fewer."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count

import pytest

from common.processes import store, take_turns


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> list[Iterator[int]]:
    """What two processes are given of twenty places."""
    places = count(1)
    monkeypatch.setattr(store, "num_started", lambda: 2)
    monkeypatch.setattr(store, "_next_key", lambda kind: kind)
    monkeypatch.setattr(store, "shared_count", lambda name, add: next(places))
    return [take_turns(20) for _ in range(2)]


def passes(works: Sequence[int], replicas: Sequence[Iterator[int]]) -> list[int]:
    """When each of two replicas has nothing more to do, one request at a time being decoded."""
    ends = [0, 0]
    busy = [(0, replica) for replica in range(2)]
    while busy:
        now, replica = heapq.heappop(busy)
        ends[replica] = now
        place = next(replicas[replica], None)
        if place is not None:
            heapq.heappush(busy, (now + works[place], replica))
    return ends


def test_each_place_is_given_once_and_the_end_is_told_to_all(replicas: list[Iterator[int]]) -> None:
    one, other = replicas
    assert [next(one), next(other), next(other)] == [0, 1, 2]
    assert [*one] == list(range(3, 20)) and [*other] == []


def test_one_process_has_all_of_them() -> None:
    assert [*take_turns(3)] == [0, 1, 2]


@pytest.mark.parametrize("works", [[20, 100] * 10, [100] * 4 + [20] * 16, [20] * 16 + [100] * 4])
def test_replicas_end_together_though_requests_differ_five_fold(
    works: list[int], replicas: list[Iterator[int]]
) -> None:
    ends, equal = passes(works, replicas), passes(works, [iter(range(0, 20, 2)), iter(range(1, 20, 2))])
    assert sum(ends) == sum(equal) == sum(works), "nobody waits before the end"
    assert abs(ends[0] - ends[1]) <= 100 and max(ends) <= max(equal)
    if works[:2] == [20, 100]:
        assert (max(ends), max(equal)) == (620, 1000)
