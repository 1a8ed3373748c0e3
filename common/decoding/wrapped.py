"""Base class of engines that wrap another engine."""

from __future__ import annotations

import time
from typing import Any, cast

from common.config import DecodeConfig
from common.decoding.engine import Engine, GivesLogprobs, PassCosts, Prefixes, prefixes_of, taking_orders
from common.decoding.orders import FIRST_VERSION, Order, Tag
from common.decoding.plan import Int, Logprobs, Predictions, StepPlan


class WrappedEngine:
    """Delegates to the wrapped engine; a subclass's `answer` replaces the predictions."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.capacity = engine.capacity
        self.mesh = engine.mesh
        self.answer_seconds = 0.0  # of the last step

    def forward(self, plan: StepPlan) -> Predictions:
        predictions = self.engine.forward(plan)
        began = time.perf_counter()
        answer = self.answer(plan, predictions)
        self.answer_seconds = time.perf_counter() - began
        return answer

    def answer(self, plan: StepPlan, predictions: Predictions) -> Predictions:
        raise NotImplementedError

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        self.engine.commit(plan, winner_row_of_request)

    def logprobs(self, plan: StepPlan, entry_F: Int, token_F: Int, num_top: int) -> Logprobs:
        return cast(GivesLogprobs, self.engine).logprobs(plan, entry_F, token_F, num_top)

    def measure_passes(self, decode: DecodeConfig) -> PassCosts | None:
        return self.engine.measure_passes(decode)

    def describe(self) -> dict[str, Any]:
        return self.engine.describe()

    @property
    def prefixes(self) -> Prefixes | None:
        return prefixes_of(self.engine)

    @property
    def weight_version(self) -> str:
        return getattr(self.engine, "weight_version", FIRST_VERSION)

    @property
    def released(self) -> frozenset[Tag]:
        return getattr(self.engine, "released", frozenset())

    def obey(self, order: Order) -> None:
        taking_orders(self.engine).obey(order)

    def close(self) -> None:
        self.engine.close()
