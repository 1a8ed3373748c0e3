"""The engines' counts in Prometheus' terms, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.serving.http.engines.client import EngineClient
from common.serving.http.engines.replica import Replica
from common.serving.messages import TOKEN_BUCKETS, WINDOW_BUCKETS

LABELS = ("model_name", "engine")
_PHASES = ("prefill", "denoise", "commit")


class EngineMetrics(Collector):
    """The engines' metrics, each with the labels LABELS."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        found = [metric for replica in self._engine.replicas for metric in self._metrics(replica)]
        for first, *others in _by_name(found):
            first.samples += [sample for other in others for sample in other.samples]
            yield first

    def _metrics(self, replica: Replica) -> Iterator[Metric]:
        """Yield a replica's metrics."""
        values, counts = [self._model_name, str(replica.number)], replica.counts
        is_draining = self._engine.state == "draining"
        for name, about, value in (
            ("vllm:num_requests_running", "Requests being decoded.", counts.num_running_now),
            ("vllm:num_requests_waiting", "Requests that wait for room.", counts.num_waiting_now),
            ("vllm:kv_cache_usage_perc", "Share of the KV memory's pages in use, 0 to 1.", counts.kv_usage),
            ("lopa_request_slots", "Requests that can be decoded at once.", counts.num_slots),
            ("lopa_requests_open", "Requests taken and not ended.", replica.num_under_way),
            ("lopa_engine_silence_seconds", "Since the engine's last word.", replica.silent_s),
            ("lopa_ready", "1 where requests are taken.", int(replica.state == "ready" and not is_draining)),
            ("lopa_draining", "1 where requests are finished and none is taken.", int(is_draining)),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(name, about, labels=LABELS)
            gauge.add_metric(values, value)
            yield gauge
        forwards = {phase: counts.forwards.get(phase, 0) for phase in _PHASES}
        about = "Passes, by what the furthest of their requests does."
        yield _counter("lopa_forwards", about, values, forwards, "phase")
        wins = {"anchor": 0, **counts.wins}
        yield _counter("lopa_branch_wins", "Steps of requests, by the branch that won.", values, wins, "branch")
        if counts.ways:
            yield _counter("lopa_way_steps", "Steps of requests, by the way of the pace.", values, counts.ways, "way")
        for name, about, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens whose KV was looked for.", counts.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens whose KV was there.", counts.prefix_hits),
            ("lopa_rows", "Branches computed.", counts.num_rows),
            ("lopa_committed_positions", "Positions whose KV became final, prompts too.", counts.num_committed),
            ("lopa_blocks_committed", "Blocks after the prompt whose KV became final.", counts.num_blocks),
            ("lopa_graph_hits", "Uses of a captured graph.", counts.graph_hits),
            ("lopa_graph_misses", "Shapes captured at their use, or run without a graph.", counts.graph_misses),
            ("lopa_engine_ends", "Times that the engine has ended.", replica.num_ends),
        ):
            yield _counter(name, about, values, {"": value})
        for name, about, bounds, histogram, total in (
            ("vllm:iteration_tokens_total", "Entries of a pass, all rows of all requests.", TOKEN_BUCKETS,
             counts.tokens_histogram, counts.tokens_sum),
            ("lopa_window_length", "Positions of the window of a row.", WINDOW_BUCKETS,
             counts.windows_histogram, counts.windows_sum),
        ):  # fmt: skip
            yield _histogram(name, about, values, bounds, histogram, total)


def _by_name(metrics: Iterable[Metric]) -> Iterable[list[Metric]]:
    groups: dict[str, list[Metric]] = {}
    for metric in metrics:
        groups.setdefault(metric.name, []).append(metric)
    return groups.values()


def _counter(name: str, about: str, own: list[str], values: Mapping[str, int], label: str | None = None) -> Metric:
    family = CounterMetricFamily(name, about, labels=[*LABELS, label] if label else LABELS)
    for key, value in values.items():
        family.add_metric([*own, key] if label else own, value)
    return family


def _histogram(
    name: str, about: str, own: list[str], bounds: Sequence[int], counts: Sequence[int], total: int
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, about, labels=LABELS)
    ends = [*map(float, bounds), "+Inf"]
    counts = counts or [0] * len(ends)
    buckets = [(str(end), count) for end, count in zip(ends, accumulate(counts), strict=True)]
    family.add_metric(own, buckets=buckets, sum_value=total)
    return family
