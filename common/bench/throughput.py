"""Tokens a second at several loads: a large model's passes, timed as they are, with a small trained model's answers.

With random weights nothing would be accepted, and a recording fits one number of lookaheads only. Here a trained model
with the same vocabulary answers every plan after the timed pass; its own time is taken out of every clock.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, median, quantiles
from typing import cast

from common.bench.load import LEAST_REQUESTS, LoadOptions, LoadResult, Setting, for_loads, prompts_of, tell, waits_for
from common.checkpoint import ModelConfig, load_model_config
from common.config import DeviceProfile, RunConfig
from common.decoding import (
    Completion,
    Engine,
    GenerationRequest,
    Int,
    PassCosts,
    Predictions,
    Scheduler,
    StepPlan,
    WrappedEngine,
    decode_requests,
)
from common.generate import build_generator
from common.platforms import build_engine
from common.runtime import DeviceEngine, facts_of, step_floors_ms
from common.tables import markdown


class AnsweredEngine(WrappedEngine):
    """Passes of `engine`, answers of `answering`, which gets the same plans and commits.

    seconds_apart: spent on answers so far. passes: what each pass was.
    """

    def __init__(self, engine: DeviceEngine, answering: Engine, finish: Callable[[], None]) -> None:
        super().__init__(engine)
        self.seconds_apart = 0.0
        self.passes: list[PassNote] = []
        self._timed = engine
        self._answering = answering
        self._finish = finish
        self._plan: StepPlan | None = None

    def clock(self) -> float:
        return time.perf_counter() - self.seconds_apart

    def launch(self, plan: StepPlan) -> None:
        self._plan, began = plan, self.clock()
        self._timed.launch(plan)
        num_requests = int(plan.request_R[-1]) + 1
        note = PassNote(
            began,
            began + self.seconds_apart,
            plan.num_tokens,
            plan.num_rows,
            num_requests,
            self._timed.last_num_tokens(),
        )
        self.passes.append(note)

    def receive(self) -> Predictions:
        self._timed.receive()
        assert self._plan is not None, "receive follows launch"
        began = time.perf_counter()
        predictions = self._answering.forward(self._plan)
        self.seconds_apart += time.perf_counter() - began
        return predictions

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        began = time.perf_counter()
        self._answering.commit(plan, winner_row_of_request)
        self._finish()
        self.seconds_apart += time.perf_counter() - began
        self._timed.commit(plan, winner_row_of_request)


@dataclass(frozen=True, slots=True)
class PassNote:
    """began: seconds by the clock without answers. began_at: with them. num_padded: tokens that the pass ran at."""

    began: float
    began_at: float
    num_tokens: int
    num_rows: int
    num_requests: int
    num_padded: int


@dataclass(frozen=True, slots=True)
class Load:
    """One line of the result. Tokens are counted up to the end of each text.

    step_ms: medians; floor_ms: the larger of reading the weights and multiplying a pass's own tokens, the mean.
    """

    at_once: int
    setting: str
    tokens_per_s: float
    tokens_per_s_of_request: float
    tokens_per_pass: float
    rows_per_request: float
    tokens_of_pass: float
    padding: float
    step_ms: float
    step_p99_ms: float
    floor_ms: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """Decodes the same prompts at one load after another.

    engine: what is timed; its settings are the answering model's. floors: of `measure_floors`. finish: waits until the
    device has done everything.
    """

    engine: DeviceEngine
    answering: Engine
    timed_model: ModelConfig
    answering_model: ModelConfig
    floors: dict[str, float]
    finish: Callable[[], None]

    def measure(
        self, setting: Setting, costs: PassCosts | None, at_once: int, prompts: Sequence[tuple[int, ...]]
    ) -> Load:
        """costs: by which the load decides, where the setting has a pace."""
        answered = AnsweredEngine(self.engine, self.answering, self.finish)
        model, decode = self.answering_model, setting.decode
        scheduler = Scheduler(
            decode, mask_token_id=model.mask_of(decode.mask_token_id), eos_token_id=model.eos_token_id,
            num_slots=at_once, clock=answered.clock, pace=setting.pace, costs=costs, facts=facts_of(model),
        )  # fmt: skip
        requests = [GenerationRequest(str(index), prompt) for index, prompt in enumerate(prompts)]
        began = answered.clock()
        results = list(decode_requests(requests, scheduler, cast(Engine, answered)))
        took = answered.clock() - began
        completions = [result for result in results if isinstance(result, Completion)]
        return self._summary(completions, answered.passes, took, at_once, setting.name)

    def _summary(
        self, completions: list[Completion], passes: list[PassNote], took: float, at_once: int, setting: str
    ) -> Load:
        full = [index for index, note in enumerate(passes[:-1]) if note.num_requests == at_once] or [0]
        steps = [(passes[index + 1].began - passes[index].began) * 1e3 for index in full]
        floor = partial(step_floors_ms, self.timed_model, self.floors, tp_size=self.engine.mesh.tp_size)
        num_ranks = self.engine.mesh.bp_size
        return Load(
            at_once=at_once,
            setting=setting,
            tokens_per_s=sum(done.num_effective_tokens for done in completions) / took,
            tokens_per_s_of_request=fmean(done.num_effective_tokens / done.total_s for done in completions),
            tokens_per_pass=fmean(done.tokens_per_forward for done in completions),
            rows_per_request=fmean(passes[index].num_rows / at_once for index in full),
            tokens_of_pass=fmean(passes[index].num_tokens for index in full),
            padding=1 - sum(note.num_tokens for note in passes) / sum(note.num_padded * num_ranks for note in passes),
            step_ms=median(steps),
            step_p99_ms=quantiles(steps, n=100)[98] if len(steps) > 1 else steps[0],
            floor_ms=fmean(max(floor(num_tokens=passes[index].num_tokens // num_ranks).values()) for index in full),
        )


def measure_throughput(profile: DeviceProfile, run: RunConfig, answers: RunConfig, options: LoadOptions) -> LoadResult:
    """run: what is timed; dummy weights will do. answers: whose model, settings and input decide which tokens are
    accepted; both models have one vocabulary. Requests are four times as many as at once, 16 at the least.

    Raises ConfigError or EngineError.
    """
    answers = for_loads(answers, options.most)
    run = for_loads(run, options.most).model_copy(update={"decode": answers.decode})
    with build_generator(profile, answers) as answering, closing(build_engine(profile, run)) as timed:
        engine = cast(DeviceEngine, timed)
        floors = engine.measure_floors()
        throughput = Throughput(
            engine, answering.engine, load_model_config(run.model), answering.model_config, floors, waits_for(profile)
        )
        costs = engine.measure_passes(answers.decode)
        prompts = prompts_of(answers, answering.tokenizer, max(LEAST_REQUESTS, 4 * options.most))
        loads = []
        for at_once, setting in itertools.product(options.at_once, options.settings_over(answers.decode)):
            shown = prompts[: max(LEAST_REQUESTS, 4 * at_once)]
            for _ in range(2):  # the first time, what has not been captured is
                load = throughput.measure(setting, costs, at_once, shown)
            loads.append(load)
            tell(_table([load]).splitlines()[-1])
        content = {"conditions": timed.describe(), "floors": floors, "costs": costs, "loads": list(map(asdict, loads))}
        return LoadResult(_table(loads), content)


def _table(loads: Sequence[Load]) -> str:
    headings = [
        "at once", "setting", "tokens/s", "of a request", "a pass and request", "rows a request", "tokens of a pass",
        "padding", "step ms", "99 %", "floor ms",
    ]  # fmt: skip
    rows = [
        [str(load.at_once), load.setting, f"{load.tokens_per_s:,.0f}", f"{load.tokens_per_s_of_request:,.0f}",
         f"{load.tokens_per_pass:.2f}", f"{load.rows_per_request:.2f}", f"{load.tokens_of_pass:,.0f}",
         f"{load.padding:.1%}", f"{load.step_ms:.2f}", f"{load.step_p99_ms:.2f}", f"{load.floor_ms:.2f}"]
        for load in loads
    ]  # fmt: skip
    return markdown(headings, rows)
