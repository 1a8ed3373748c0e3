"""Engines that are watched while they decode: an Ascend engine that commits, and two that answer the same steps."""

from __future__ import annotations

from typing import Any

import torch

from common.decoding import Engine, Int, Predictions, StepPlan
from lopa_ascend.engine import AscendEngine


class WatchingEngine:
    """The engine, and before every commit a look at the spans that are about to become final: rows that hold the same
    must agree. num_compared: how often there were several."""

    def __init__(self, engine: AscendEngine) -> None:
        self.engine, self.capacity, self.mesh = engine, engine.capacity, engine.mesh
        self.logprobs = engine.logprobs
        self.num_compared = 0

    def forward(self, plan: StepPlan) -> Predictions:
        return self.engine.forward(plan)

    def commit(self, plan: StepPlan, winners: Int) -> None:
        for span in plan.commits:
            held = self.engine.kv.pages_of(span.slot)
            views = [self.kv(held.shared + tail, span.start + span.length) for tail in held.tails[: held.num_rows]]
            for view in views[1:]:
                torch.testing.assert_close(view, views[0], rtol=1e-5, atol=1e-5)
                self.num_compared += 1
        self.engine.commit(plan, winners)

    def kv(self, pages: tuple[int, ...], length: int) -> torch.Tensor:
        """[L, 2, length, K, H]"""
        return self.engine.cache.read(list(pages))[:, :, :length]


class Agreement:
    """Follows one engine and asks another for the same steps: the share of equal predictions.

    Two decodings of a random model in bfloat16 part ways at the first tie, so they are compared position by position,
    where the first engine's best token is ahead of its second by at least `margin`.
    """

    def __init__(self, leader: Any, follower: Engine, margin: float = 0.05) -> None:
        self.leader, self.follower, self.capacity = leader, follower, leader.capacity
        self.mesh, self.logprobs = leader.mesh, leader.logprobs
        self.margin = margin
        self.num_equal = self.num_read = 0

    def forward(self, plan: StepPlan) -> Predictions:
        wanted, found = self.leader.forward(plan), self.follower.forward(plan)
        is_clear = plan.is_read_T & (wanted.confidence_T >= self.margin)
        self.num_read += int(is_clear.sum())
        self.num_equal += int((wanted.token_T == found.token_T)[is_clear].sum())
        return wanted

    def commit(self, plan: StepPlan, winners: Int) -> None:
        self.leader.commit(plan, winners)
        self.follower.commit(plan, winners)
