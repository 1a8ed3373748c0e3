"""The numbers of a run as one flat row: for CSV files and tables of several runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Number = float | int | None


def flat_numbers(metrics: Mapping[str, Any]) -> dict[str, Number]:
    """Column -> number of a run's metrics; None where the run has none. Shares and TPF are plain numbers, times
    seconds.

    tpf_*: the mean of the requests' ratios. tps_*_aggregate: of the last start that decoded anything.
    """
    accuracy, start = metrics["accuracy"] or {}, metrics.get("this_start") or {}
    row: dict[str, Number] = {
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
