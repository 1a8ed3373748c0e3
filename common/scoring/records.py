"""The output line of a finished request, and what every number in it means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from common.decoding import Completion

Record = Mapping[str, Any]
DEFINITIONS = {
    "step": "one forward pass of a request, whatever the number of branches; the first step, with the prompt, included",
    "canvas": "every generated position counts, those after the end of the text too (the published way of counting)",
    "effective": "tokens up to and including the first EOS or stop string count",
    "tpf": "tokens per forward pass: tokens / steps, as the mean of the requests' ratios and as all tokens / all steps",
    "tps": "tokens per second of one request, from its admission to its end, also where others are decoded with it; "
    "mean, max and mean of the 10 best",
    "without_first_step": "the first step's time is left out but its tokens are counted (the paper's way); requests of "
    "one step are left out",
    "latency_s": "seconds of a request from its admission to its end",
    "rows_per_step": "branches computed a step, the anchor among them: all rows / all steps",
    "wins_by_branch": "steps won by each branch: first the anchor, then the lookaheads from the surest one on",
    "windows": "steps by the positions that the winner computed in them; the first step, with the prompt, left out",
    "this_start": "requests finished since this start; aggregate: all their tokens / wall time, loading excluded",
    "area_under_accuracy": "AUP: the area under the curve of accuracy (in %) over effective TPF. An accuracy is "
    "multiplied by exp(-3 (1 - accuracy / best accuracy)); settings more than 5 points below the slowest are left out",
    "accuracy": "share of the scored requests that are right, with its binomial standard error",
    "scored_by": "records by what their marks depend on beside this version: libraries that compared, or Python and "
    "how programs were isolated",
}


def request_record(id: str | int, text: str, completion: Completion, *, has_step_map: bool = False) -> dict[str, Any]:
    """The output line of a finished request. has_step_map: its tokens too, and the pass that predicted each."""
    canvas, effective, steps = completion.num_canvas_tokens, completion.num_effective_tokens, completion.num_forwards
    wins = Counter(completion.winner_per_step)
    later_s = completion.total_s - completion.first_step_s if steps > 1 else 0.0
    return {
        "id": id,
        "text": text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_length,
        "canvas_tokens": canvas,
        "effective_tokens": effective,
        "steps": steps,
        "rows": completion.num_rows,
        "lookahead_wins": completion.num_lookahead_wins,
        **({"ways": [list(stay) for stay in completion.ways]} if completion.ways else {}),
        "wins_by_branch": [wins[branch] for branch in range(1 + max(wins, default=0))],
        "windows": {str(length): count for length, count in sorted(Counter(completion.window_per_step[1:]).items())},
        "tpf_canvas": canvas / steps,
        "tpf_effective": effective / steps,
        "seconds": completion.total_s,
        "first_step_seconds": completion.first_step_s,
        "tps_canvas": per_second(canvas, completion.total_s),
        "tps_effective": per_second(effective, completion.total_s),
        "tps_canvas_without_first_step": per_second(canvas, later_s),
        "tps_effective_without_first_step": per_second(effective, later_s),
        **({"token_ids": list(completion.token_ids), "step_map": list(completion.step_map)} if has_step_map else {}),
        **({"option_logprobs": list(completion.option_logprobs)} if completion.option_logprobs else {}),
    }


def per_second(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None
