"""Does a branch's score say what the next passes accept?

python -m scripts.lab.study.foresight --profile cpu --run demo --problems 50 --out outputs/study/foresight.json

Every step is looked at in two ways. Among its branches: the rank correlation of C(B) with the masks that the branch
would fill at once. Over time: that of the winner's C(B) with the tokens of this step and of the steps after it.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import Any

import numpy as np

from common.decoding import StepRecord
from scripts.lab.study import given

NUM_BINS = 10


def rank_correlation(first: list[float], second: list[float]) -> float | None:
    """Spearman's; ties share their mean rank. None where one of them does not vary."""
    one, other = _ranks(first), _ranks(second)
    if not one.std() or not other.std():
        return None
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: list[float]) -> Any:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    end = count.cumsum()
    return ((end - count + end - 1) / 2)[place]


def study(generator: given.Generator, num_problems: int) -> dict[str, Any]:
    steps: dict[str, list[StepRecord]] = defaultdict(list)
    posed = given.problems(generator.run, num_problems)
    with generator.decoding() as core:
        core.scheduler.observe(lambda record: steps[record.request_id].append(record))
        for request in given.requests(generator, posed, [0]):
            core.add_request(request)
        while core.has_work:
            core.step()
    within = [
        rank_correlation(record.branch_scores, [float(count) for count in record.num_sure])
        for records in steps.values()
        for record in records
        if len(record.branch_scores) > 2
    ]
    scored = [(max(record.branch_scores), brought(records, index)) for records in steps.values()
              for index, record in enumerate(records)]  # fmt: skip
    return {
        "problems": len(posed), "steps": len(scored),
        "among_branches": {
            "mean_rank_correlation": fmean(value for value in within if value is not None),
            "steps": sum(value is not None for value in within),
        },
        "over_time": {
            f"tokens_of_{span}_steps": rank_correlation([each for each, _ in scored], [own[span] for _, own in scored])
            for span in (1, 2, 3)
        },
        "calibration": _bins(scored), "environment": generator.describe(),
    }  # fmt: skip


def brought(records: list[StepRecord], index: int) -> dict[int, float]:
    """Tokens filled by the steps from this one on, 1, 2 and 3 of them."""
    counts = [len(record.filled) for record in records[index : index + 3]]
    return {span: float(sum(counts[:span])) for span in (1, 2, 3)}


def _bins(scored: list[tuple[float, dict[int, float]]]) -> list[dict[str, float]]:
    """Steps in order of the winner's score, in equal parts: what each scored and brought."""
    ordered = sorted(scored, key=lambda pair: pair[0])
    parts = [ordered[len(ordered) * n // NUM_BINS : len(ordered) * (n + 1) // NUM_BINS] for n in range(NUM_BINS)]
    return [
        {"score": fmean(score for score, _ in part), "tokens_of_the_step": fmean(own[1] for _, own in part),
         "tokens_of_3_steps": fmean(own[3] for _, own in part)}
        for part in parts
        if part
    ]  # fmt: skip


def main() -> None:
    options = given.parser(__doc__).parse_args()
    with given.load(options) as generator:
        given.write(options.out, study(generator, options.problems))


if __name__ == "__main__":
    main()
