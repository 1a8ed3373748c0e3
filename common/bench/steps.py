"""How long a step takes and what bounds it: single shapes, whole decoding steps by part, and tokens per second.

    floors (copy bandwidth, matrix rate) -> shapes (rows x window) -> mixes of windows -> decoding steps

Every section is measured in one run on one machine, so that ratios are fair. Predictions of the decoding steps are
scripted (common.bench.timed): with random weights nothing would be accepted.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

from common.bench.report import publish
from common.bench.timed import ScriptedEngine, TimedDecoding, request_times
from common.checkpoint import ModelConfig, load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import StepPlan
from common.platforms import Platform, build_engine, platform_of
from common.runtime import DeviceEngine, check_decode, facts_of, step_floors_ms, synthetic_plan

TRACED_STEPS = 10
SEVERAL_ROWS = ((2, 64), (4, 32), (4, 64), (8, 64), (8, 128))


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """cases: (rows on each rank, window). mixes: windows whose step times are averaged, by name. read_share: share of
    a window's positions that go through the head. num_cached: prompt before the window. accepted: tokens a step of each
    section of decoding steps. trace: an existing folder for the profiler's trace of some steps of the first case."""

    cases: tuple[tuple[int, int], ...] = (*((1, window) for window in range(32, 257, 32)), *SEVERAL_ROWS)
    mixes: tuple[tuple[int, tuple[int, ...]], ...] = ((163, (96, 128, 160, 192, 240)), (194, (128, 160, 192, 224, 264)))
    num_cached: int = 1024
    num_steps: int = 60
    read_share: float = 0.6
    num_requests: int = 4
    accepted: tuple[int, ...] = (3, 6, 9)
    output: str | None = None
    trace: str | None = None


def run_bench(profile: DeviceProfile, run: RunConfig, options: BenchOptions) -> dict[str, Any]:
    """Measure everything; the first rank also prints the tables and writes `options.output`.

    Raises ConfigError for settings that the model cannot be decoded by.
    """
    config = load_model_config(run.model)
    check_decode(run.decode, profile, config)
    engine = cast(DeviceEngine, build_engine(profile, run))
    try:
        bench = _Bench(engine, config, run.decode, options)
        result = bench.run()
        result["conditions"] |= {**engine.describe(), "profile": profile.name, "model": run.model}
        if engine.mesh.rank == 0:
            publish(result, options.output)
        if options.trace is not None:
            bench.trace(platform_of(profile), Path(options.trace))
    finally:
        engine.close()
    return result


class _Bench:
    def __init__(self, engine: DeviceEngine, config: ModelConfig, decode: DecodeConfig, options: BenchOptions) -> None:
        self.engine = engine
        self.config = config
        self.decode = decode
        self.options = options
        self.floors = engine.measure_floors()

    def run(self) -> dict[str, Any]:
        options = self.options
        return {
            "conditions": {
                key: value for key, value in asdict(options).items() if key not in ("cases", "mixes", "trace")
            },
            "floors": self.floors,
            "shapes": [self.shape(rows, width) for rows, width in options.cases],
            "mixes": [self.mix(mean, widths) for mean, widths in options.mixes],
            "steps": [self.steps(count) for count in options.accepted],
            "memory": self.engine.memory(),
        }

    def shape(self, rows: int, width: int) -> dict[str, Any]:
        """Medians of one shape: the device's time by part, the call of `forward` without noting it, and the floors."""
        plan = self._plan(rows, width)
        calls, parts = [], []
        for is_noted in (True, False):
            self.engine.keep_times(is_noted)
            for _ in range(self.options.num_steps + 5):
                began = time.perf_counter()
                self.engine.forward(plan)
                if is_noted:
                    parts.append(self.engine.last_times_ms())
                else:
                    calls.append((time.perf_counter() - began) * 1e3)
        part_ms = {name: median(part[name] for part in parts[5:]) for name in parts[-1]}
        device_ms = median(sum(part.values()) for part in parts[5:]) if part_ms else median(calls[5:])
        updates_ms = self.engine.length_updates_ms()
        num_reads = int(plan.is_read_T.sum()) // self.engine.mesh.bp_size
        hit = self.engine.num_experts_hit(plan)
        floors = step_floors_ms(self.config, self.floors, rows * width, self.engine.mesh.tp_size, hit)
        return {
            "rows": rows,
            "width": width,
            "reads": num_reads,
            "device_ms": device_ms,
            **{f"{name}_ms": value for name, value in part_ms.items()},
            "gather_ms": self.engine.gather_ms(num_reads),
            "call_ms": median(calls[5:]),
            "length_updates_ms": updates_ms,
            **floors,
            "experts_hit": hit,
            "ratio": device_ms / max(floors.values()),
        }

    def trace(self, platform: Platform, folder: Path) -> None:
        """Trace some steps of the first case, which is captured and warm, on the first rank."""
        plan = self._plan(*self.options.cases[0])
        self.engine.keep_times(False)
        with platform.profiled(folder) if self.engine.mesh.rank == 0 else nullcontext():
            for _ in range(TRACED_STEPS):
                self.engine.forward(plan)

    def _plan(self, rows: int, width: int) -> StepPlan:
        return synthetic_plan(
            self.config, num_rows=rows * self.engine.mesh.bp_size, width=width, num_cached=self.options.num_cached,
            read_share=self.options.read_share,
            block_size=self.decode.block_size if self.decode.window_attention == "block_causal" else None,
        )  # fmt: skip

    def mix(self, mean: int, widths: tuple[int, ...]) -> dict[str, Any]:
        """The mean step over windows of several widths, with the rows that this run's branches put on a rank."""
        rows = -(-(self.decode.num_lookahead + 1) // self.engine.mesh.bp_size)
        shapes = [self.shape(rows, width) for width in widths]
        return {
            "mean_width": mean,
            "widths": widths,
            "rows": rows,
            "device_ms_by_window": [shape["device_ms"] for shape in shapes],
            **{name: fmean(shape[name] for shape in shapes) for name in ("device_ms", "call_ms")},
        }

    def steps(self, num_accepted: int) -> dict[str, Any]:
        """Whole decoding steps by part, with a fixed number of accepted tokens; prompts' first steps are left out."""
        facts = facts_of(self.config)
        scripted = ScriptedEngine(self.engine, num_accepted, shift=facts.shift)
        decode = self.decode.model_copy(update={"stop_at_eos": False, "skip_threshold": 0.9})
        mask_token_id = self.config.mask_of(decode.mask_token_id)
        for num_requests in (1, self.options.num_requests):  # the first captures what has not been
            timed = TimedDecoding(scripted, self.engine, decode, mask_token_id, facts)
            completions = [timed.decode((0,) * self.options.num_cached) for _ in range(num_requests)]
        return {"accepted": num_accepted, **request_times(completions), **timed.summary()}
