"""Tokens per second of a model over many requests at once: the first run and the second, step times, captures.

At each number of requests at once an engine is built, and all prompts are decoded twice. A step at full load is one
with as many requests as that; where there was none, its time is null.
"""

from __future__ import annotations

import time
from statistics import median, quantiles
from typing import Any

from common.bench.load import LoadOptions, LoadResult, for_loads, prompts_of, tell
from common.config import DeviceProfile, RunConfig
from common.decoding import Completion, GenerationRequest
from common.generate import Generator, build_generator
from common.tables import markdown

_COLUMNS = {
    "at_once": "at once",
    "first_tps": "tokens/s, first run",
    "second_tps": "tokens/s, second run",
    "step_ms": "ms a step, median",
    "p99_ms": "ms, 99 %",
    "full_steps": "steps timed",
    "captures": "shapes captured, first run",
    "captures_second": "second run",
}


def measure_requests(profile: DeviceProfile, run: RunConfig, options: LoadOptions) -> LoadResult:
    """Measure each number of requests at once. Raises ConfigError or EngineError."""
    rows = []
    for at_once in options.at_once:
        rows.append(_measure(profile, for_loads(run, at_once), options.num_prompts, at_once))
        tell("; ".join(f"{heading}: {_cell(rows[-1][name])}" for name, heading in _COLUMNS.items()))
    cells = [[_cell(row[name]) for name in _COLUMNS] for row in rows]
    return LoadResult(markdown(list(_COLUMNS.values()), cells), {"loads": rows})


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if isinstance(value, float) else str(value)


def _measure(profile: DeviceProfile, run: RunConfig, num_prompts: int, at_once: int) -> dict[str, Any]:
    with build_generator(profile, run) as generator:
        prompts = prompts_of(run, generator.tokenizer, num_prompts)
        requests = [GenerationRequest(str(number), prompt) for number, prompt in enumerate(prompts)]
        before = _num_captured(generator)
        first = _decode(generator, requests, at_once)
        between = _num_captured(generator)
        second = _decode(generator, requests, at_once)
        found = {
            "at_once": at_once, "first_tps": first["tps"], "second_tps": second["tps"], "step_ms": second["step_ms"],
            "p99_ms": second["p99_ms"], "full_steps": second["steps"], "captures": between - before,
            "captures_second": _num_captured(generator) - between, "captured_ahead": before,
        }  # fmt: skip
        return {**found, **generator.describe()}


def _decode(generator: Generator, requests: list[GenerationRequest], at_once: int) -> dict[str, Any]:
    num_tokens, times_ms = 0, []
    began = time.perf_counter()
    with generator.decoding() as core:
        for request in requests:
            core.add_request(request)
        while core.has_work:
            is_full, started = len(core.scheduler.active) == at_once, time.perf_counter()
            outputs = core.step()
            if is_full:
                times_ms.append((time.perf_counter() - started) * 1e3)
            num_tokens += sum(len(output.token_ids) for output in outputs)
            assert all(output.result is None or isinstance(output.result, Completion) for output in outputs)
    tps = num_tokens / (time.perf_counter() - began)
    if not times_ms:  # fewer prompts than requests at once
        return {"tps": tps, "step_ms": None, "p99_ms": None, "steps": 0}
    p99_ms = quantiles(times_ms, n=100)[98] if len(times_ms) > 1 else times_ms[0]
    return {"tps": tps, "step_ms": median(times_ms), "p99_ms": p99_ms, "steps": len(times_ms)}


def _num_captured(generator: Generator) -> int:
    memory = getattr(generator.engine, "memory", None)
    return 0 if memory is None else int(memory().get("graphs", 0))
