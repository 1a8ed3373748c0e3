"""Ranks that exchange values, one after another in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def on_ranks(num_ranks: int, work: Callable[[int, Callable[[Tensor], Tensor]], Result]) -> list[Result]:
    """What `work(rank, gather)` returns on each rank; gather stacks what all ranks give.

    For each exchange every rank works from its beginning again, so `work` must leave its inputs as they were.
    """
    known: list[Tensor] = []
    while True:
        ranks = [_Rank(known) for _ in range(num_ranks)]
        results = [rank.result_of(work, number) for number, rank in enumerate(ranks)]
        given = [rank.given for rank in ranks if rank.given is not None]
        if not given:
            return [result for result in results if result is not None]
        known.append(torch.stack(given))


class _WantsOthersError(Exception):
    """The other ranks' values of an exchange are not there yet."""


class _Rank:
    """known: what the first exchanges brought. given: this rank's part of the next one."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        self._known = iter(known)
        self.given: Tensor | None = None

    def result_of(self, work: Callable[[int, Callable[[Tensor], Tensor]], Result], number: int) -> Result | None:
        try:
            return work(number, self._gather)
        except _WantsOthersError:
            return None

    def _gather(self, value: Tensor) -> Tensor:
        for stacked in self._known:
            return stacked
        self.given = value
        raise _WantsOthersError
