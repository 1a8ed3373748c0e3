"""From the records of an output file to the numbers of a run, each with the definition that it is printed beside.

Everything here is computed from the file, so that a run which was killed and resumed reports all of its requests; only
what needs a wall clock (`this_start`) is about one start.
"""

from __future__ import annotations

import itertools
import math
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from common.request import Completion
from common.version import LOPA_VERSION

Record = Mapping[str, Any]
TOP = 10
AUP_STEEPNESS = 3.0
AUP_MAX_LOSS = 5.0

DEFINITIONS = {
    "step": "one forward pass of a request, whatever the number of branches; the first step, with the prompt, included",
    "canvas": "every generated position counts, behind the end of the text too (the published way of counting)",
    "effective": "tokens up to and including the first EOS or stop string count",
    "tpf": "tokens per forward pass: tokens / steps; per_request_mean is the mean of the requests' ratios, total is "
    "all tokens / all steps",
    "tps": "tokens per second of one request, from its admission to its end; mean, max and top10_mean over requests",
    "without_first_step": "the first step's time is left out but its tokens are counted (the paper's way); requests of "
    "one step are left out",
    "latency_s": "seconds of a request from its admission to its end",
    "this_start": "requests finished since this start; tps_aggregate is their tokens / wall time, loading excluded",
    "area_under_accuracy": "AUP: area under accuracy (in %) over effective TPF, each accuracy weighted by "
    "exp(-3 (1 - it / the best)), settings more than 5 points below the slowest left out",
    "accuracy": "share of the scored requests that are right, with its binomial standard error",
}


def request_record(id: str | int, text: str, completion: Completion) -> dict[str, Any]:
    """The output line of a finished request."""
    canvas, effective, steps = completion.num_canvas_tokens, completion.num_effective_tokens, completion.num_forwards
    later_s = completion.total_s - completion.first_step_s if steps > 1 else 0.0
    return {
        "id": id,
        "text": text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_length,
        "canvas_tokens": canvas,
        "effective_tokens": effective,
        "steps": steps,
        "lookahead_wins": completion.num_lookahead_wins,
        "tpf_canvas": canvas / steps,
        "tpf_effective": effective / steps,
        "seconds": completion.total_s,
        "first_step_seconds": completion.first_step_s,
        "tps_canvas": _per_second(canvas, completion.total_s),
        "tps_effective": _per_second(effective, completion.total_s),
        "tps_canvas_without_first_step": _per_second(canvas, later_s),
        "tps_effective_without_first_step": _per_second(effective, later_s),
    }


def summarize(records: Iterable[Record]) -> dict[str, Any]:
    """The run's numbers; a section is None where no request has what it needs."""
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
        "lookahead_win_share": _ratio(_total(finished, "lookahead_wins"), _total(finished, "steps")),
    }


def summarize_start(records: Sequence[Record], wall_s: float) -> dict[str, Any]:
    """What this start added, over its own wall time: all replicas and all requests at once."""
    finished = [record for record in records if "error" not in record]
    return {
        "requests": len(finished),
        "errors": len(records) - len(finished),
        "wall_s": wall_s,
        "tps_aggregate": {
            count: _per_second(_total(finished, f"{count}_tokens"), wall_s) for count in ("canvas", "effective")
        },
    }


def area_under_accuracy(settings: Sequence[Mapping[str, Any]]) -> float | None:
    """AUP of a sweep's summaries; None if they were not scored."""
    points = sorted(
        (summary["tpf"]["effective"]["per_request_mean"], 100 * summary["accuracy"]["share"])
        for summary in settings
        if summary["accuracy"] is not None
    )
    if not points:
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


def fingerprint() -> dict[str, Any]:
    """Where the numbers come from, beside what the engine says about its device."""
    return {
        "lopa": LOPA_VERSION,
        "commit": _commit(Path(__file__).resolve().parent),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "platform": platform.platform(),
    }


_TOKEN_COUNTS = ("prompt", "canvas", "effective")


def _accuracy(finished: Sequence[Record]) -> dict[str, Any] | None:
    scored = [record for record in finished if "correct" in record]
    if not scored:
        return None
    kinds = sorted({record["kind"] for record in scored if isinstance(record.get("kind"), str)})
    by_kind = {kind: _share_correct([record for record in scored if record.get("kind") == kind]) for kind in kinds}
    return {**_share_correct(scored), "by_kind": by_kind}


def _share_correct(scored: Sequence[Record]) -> dict[str, Any]:
    from common.scoring import standard_error

    num_correct = sum(bool(record["correct"]) for record in scored)
    return {
        "correct": num_correct,
        "scored": len(scored),
        "share": num_correct / len(scored),
        "standard_error": standard_error(num_correct, len(scored)),
    }


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


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _per_second(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def _commit(folder: Path) -> str | None:
    """The commit of the checkout that this package runs from, marked if files differ; None outside of a checkout."""
    described = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(described, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
