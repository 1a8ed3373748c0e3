"""The engine's counts in Prometheus' terms, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.serving.http.engine import EngineClient
from common.serving.messages import TOKEN_BUCKETS, WINDOW_BUCKETS

_PHASES = ("prefill", "denoise", "commit")


class EngineMetrics(Collector):
    """The engine's metrics. labels: of every metric."""

    def __init__(self, engine: EngineClient, labels: Mapping[str, str]) -> None:
        self._engine = engine
        self._names, self._values = list(labels), list(labels.values())

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        counts = self._engine.counts
        about = "Entries of a pass, all rows of all requests."
        yield self._histogram(
            "vllm:iteration_tokens_total", about, TOKEN_BUCKETS, counts.tokens_histogram, counts.tokens_sum
        )
        about = "Positions of the window of a row."
        yield self._histogram("lopa_window_length", about, WINDOW_BUCKETS, counts.windows_histogram, counts.windows_sum)

    def _gauges(self) -> Iterator[Metric]:
        counts, state = self._engine.counts, self._engine.state
        for name, about, value in (
            ("vllm:num_requests_running", "Requests being decoded.", counts.num_running_now),
            ("vllm:num_requests_waiting", "Requests that wait for room.", counts.num_waiting_now),
            ("vllm:kv_cache_usage_perc", "Share of the KV memory's pages in use, 0 to 1.", counts.kv_usage),
            ("lopa_request_slots", "Requests that can be decoded at once.", counts.num_slots),
            ("lopa_requests_open", "Requests taken and not ended.", self._engine.num_open),
            ("lopa_engine_silence_seconds", "Since the engine's last word.", self._engine.silent_s),
            ("lopa_ready", "1 where requests are taken.", int(state == "ready")),
            ("lopa_draining", "1 where requests are finished and none is taken.", int(state == "draining")),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(name, about, labels=self._names)
            gauge.add_metric(self._values, value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        counts = self._engine.counts
        forwards = {phase: counts.forwards.get(phase, 0) for phase in _PHASES}
        yield self._counter("lopa_forwards", "Passes, by what the furthest of their requests does.", forwards, "phase")
        wins = {"anchor": 0, **counts.wins}
        yield self._counter("lopa_branch_wins", "Steps of requests, by the branch that won.", wins, "branch")
        rejected = {"queue_full": self._engine.num_rejected}
        yield self._counter("vllm:admission_rejections", "Requests told to come again.", rejected, "reason")
        for name, about, value in (
            ("lopa_rows", "Branches computed.", counts.num_rows),
            ("lopa_committed_positions", "Positions whose KV became final, prompts too.", counts.num_committed),
            ("lopa_blocks_committed", "Blocks after the prompt whose KV became final.", counts.num_blocks),
            ("lopa_graph_hits", "Uses of a captured graph.", counts.graph_hits),
            ("lopa_graph_misses", "Shapes captured at their use, or run without a graph.", counts.graph_misses),
        ):
            yield self._counter(name, about, {"": value})

    def _counter(self, name: str, about: str, values: Mapping[str, int], label: str | None = None) -> Metric:
        names = [*self._names, label] if label else self._names
        family = CounterMetricFamily(name, about, labels=names)
        for key, value in values.items():
            family.add_metric([*self._values, key] if label else self._values, value)
        return family

    def _histogram(
        self, name: str, about: str, bounds: Sequence[int], counts: Sequence[int], total: int
    ) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, about, labels=self._names)
        ends = [*map(float, bounds), "+Inf"]
        counts = counts or [0] * len(ends)
        buckets = [(str(end), count) for end, count in zip(ends, accumulate(counts), strict=True)]
        family.add_metric(self._values, buckets=buckets, sum_value=total)
        return family
