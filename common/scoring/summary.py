"""Compute a run's numbers from the records of its output file, each with the definition printed beside it.

Everything here is computed from the file, so that a run which was killed and resumed reports all of its requests; only
what needs a wall clock (`this_start`) is about one start.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from common.scoring.records import Record, per_second

TOP = 10
AUP_STEEPNESS = 3.0
AUP_MAX_LOSS = 5.0


def summarize(records: Iterable[Record]) -> dict[str, Any]:
    """Return the run's numbers; a section is None where no request has what it needs."""
    records = list(records)
    finished = [record for record in records if "error" not in record]
    return {
        "requests": {
            "finished": len(finished),
            "errors": len(records) - len(finished),
            "finish_reasons": dict(Counter(record["finish_reason"] for record in finished)),
        },
        "accuracy": _accuracy(finished),
        "tpf": {count: _tokens_per_forward(finished, count) for count in ("canvas", "effective")},
        "tps": {count: _tokens_per_second(finished, count) for count in ("canvas", "effective")},
        "latency_s": _spread([record["seconds"] for record in finished]),
        "first_step_s": _spread([record["first_step_seconds"] for record in finished]),
        "steps": _spread([record["steps"] for record in finished]),
        "tokens": {name: sum(record[f"{name}_tokens"] for record in finished) for name in _TOKEN_COUNTS},
        "rows_per_step": _ratio(sum(record.get("rows", 0) for record in finished), _total(finished, "steps")) or None,
        "wins_by_branch": _added(record.get("wins_by_branch", ()) for record in finished),
        "windows": _counted(record.get("windows", {}) for record in finished),
        "lookahead_win_share": _ratio(_total(finished, "lookahead_wins"), _total(finished, "steps")),
    }


def summarize_start(records: Sequence[Record], wall_s: float) -> dict[str, Any]:
    """Return what this start added, over its own wall time: all replicas and all requests at once."""
    finished = [record for record in records if "error" not in record]
    return {
        "requests": len(finished),
        "errors": len(records) - len(finished),
        "wall_s": wall_s,
        "tps_aggregate": {
            count: per_second(_total(finished, f"{count}_tokens"), wall_s) for count in ("canvas", "effective")
        },
    }


def area_under_accuracy(settings: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the AUP of a sweep's summaries; None without two that were scored and differ in TPF, which span no
    area."""
    points = sorted(
        (summary["tpf"]["effective"]["per_request_mean"], 100 * summary["accuracy"]["share"])
        for summary in settings
        if summary["accuracy"] is not None
    )
    if len({tpf for tpf, _ in points}) < 2:
        return None
    best = max(accuracy for _, accuracy in points)
    kept = [(tpf, accuracy) for tpf, accuracy in points if accuracy >= points[0][1] - AUP_MAX_LOSS]
    weighted = [
        (tpf, accuracy * math.exp(-AUP_STEEPNESS * (1 - accuracy / best)) if best else 0.0) for tpf, accuracy in kept
    ]
    area: float = kept[0][0] * kept[0][1]
    for (tpf, height), (next_tpf, next_height) in itertools.pairwise(weighted):
        area += (next_tpf - tpf) * (height + next_height) / 2
    return area


def flat_numbers(metrics: Mapping[str, Any]) -> dict[str, float | int | None]:
    """Return column -> number of a run's metrics; None where the run has none. Shares and TPF are plain numbers, times
    seconds.

    tpf_*: the mean of the requests' ratios. tps_*_aggregate: of the last start that decoded anything.
    """
    accuracy, start = metrics["accuracy"] or {}, metrics.get("this_start") or {}
    row: dict[str, float | int | None] = {
        "accuracy": accuracy.get("share"),
        "accuracy_standard_error": accuracy.get("standard_error"),
        "scored": accuracy.get("scored", 0),
    }
    for count in ("canvas", "effective"):
        rates = metrics["tps"][count]["with_first_step"]
        row |= {
            f"tpf_{count}": metrics["tpf"][count]["per_request_mean"],
            f"tpf_{count}_total": metrics["tpf"][count]["total"],
            f"tps_{count}_mean": rates["mean"],
            f"tps_{count}_max": rates["max"],
            f"tps_{count}_top10": rates["top10_mean"],
            f"tps_{count}_aggregate": (start.get("tps_aggregate") or {}).get(count),
        }
    return row | {
        "latency_s_mean": metrics["latency_s"]["mean"],
        "latency_s_max": metrics["latency_s"]["max"],
        "steps_mean": metrics["steps"]["mean"],
        "lookahead_win_share": metrics["lookahead_win_share"],
        "requests": metrics["requests"]["finished"],
        "errors": metrics["requests"]["errors"],
    }


_TOKEN_COUNTS = ("prompt", "canvas", "effective")


def _accuracy(finished: Sequence[Record]) -> dict[str, Any] | None:
    scored = [record for record in finished if "correct" in record]
    if not scored:
        return None
    kinds = sorted({record["kind"] for record in scored if isinstance(record.get("kind"), str)})
    by_kind = {kind: _share_correct([record for record in scored if record.get("kind") == kind]) for kind in kinds}
    scored_by = Counter(record["scored_by"] for record in scored if "scored_by" in record)
    return {**_share_correct(scored), "by_kind": by_kind, "by_rule": _by_rule(scored), "scored_by": dict(scored_by)}


def _by_rule(scored: Sequence[Record]) -> dict[str, Any]:
    """Return the shares by rule, for benchmarks with several; the first decides."""
    marks = [record.get("by_rule") or {} for record in scored]
    rules = list(dict.fromkeys(rule for found in marks for rule in found))
    return {rule: _share_correct([{"correct": found[rule]} for found in marks if rule in found]) for rule in rules}


def _share_correct(scored: Sequence[Record]) -> dict[str, Any]:
    num_correct = sum(bool(record["correct"]) for record in scored)
    return {
        "correct": num_correct,
        "scored": len(scored),
        "share": num_correct / len(scored),
        "standard_error": standard_error(num_correct, len(scored)),
    }


def standard_error(num_correct: int, num_problems: int) -> float:
    """Return the binomial standard error of the share num_correct / num_problems."""
    share = num_correct / num_problems
    return math.sqrt(share * (1 - share) / num_problems)


def _tokens_per_forward(finished: Sequence[Record], count: str) -> dict[str, float | None]:
    return {
        "per_request_mean": _mean([record[f"tpf_{count}"] for record in finished]),
        "total": _ratio(_total(finished, f"{count}_tokens"), _total(finished, "steps")),
    }


def _tokens_per_second(finished: Sequence[Record], count: str) -> dict[str, dict[str, float | None]]:
    rates_of = {
        "with_first_step": [record[f"tps_{count}"] for record in finished],
        "without_first_step": [record[f"tps_{count}_without_first_step"] for record in finished],
    }
    return {name: _rates([rate for rate in rates if rate is not None]) for name, rates in rates_of.items()}


def _rates(rates: Sequence[float]) -> dict[str, float | None]:
    top = sorted(rates, reverse=True)[:TOP]
    return {"mean": _mean(rates), "max": max(rates, default=None), "top10_mean": _mean(top)}


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": _mean(values), "max": max(values, default=None)}


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _total(records: Sequence[Record], key: str) -> int:
    return sum(record[key] for record in records)


def _added(lists: Iterable[Sequence[int]]) -> list[int]:
    """Add lists element by element; records of earlier versions have none."""
    return [sum(values) for values in itertools.zip_longest(*lists, fillvalue=0)]


def _counted(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return {key: total[key] for key in sorted(total, key=int)}


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
