"""Published methods without training, each beside a plain decoder that reads like its rule: one canvas, no cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attentive import MASK, Attentive, Canvas, Decoded, decoded_as, filled
from pydantic import ValidationError

from common.config import DecodeConfig
from common.decoding import ModelFacts, Scheduler

Fill = tuple[int, int]  # position and token
Told = Any  # [3 + 2 C, P]: token, probability, confidence; the most probable tokens, and their probabilities


def decoded_plainly(
    model: Attentive, prompt: Canvas, count: int, threshold: float, num_best: int,
    spawn: Callable[[Canvas, Told], list[Fill]], scores: Callable[[list[Canvas], list[Told], list[Fill]], list[float]],
    goes_on: Callable[[list[float]], bool] = lambda _: True,
) -> tuple[Canvas, int]:  # fmt: skip
    """Return the canvas and the number of passes. goes_on: whether lookaheads of these scores are followed by more."""
    canvas, fills, passes = prompt + [MASK] * count, list[Fill](), 0
    while MASK in canvas:
        branches = [[*canvas[:at], token, *canvas[at + 1 :]] for at, token in fills] + [canvas]
        told, passes = [model.read(branch, num_best) for branch in branches], passes + 1
        found = scores(branches, told, fills)
        winner = found.index(max(found))
        canvas = filled(branches[winner], told[winner], threshold)
        fills = spawn(canvas, told[winner]) if goes_on(found[:-1]) else []
    return canvas, passes


def masks_of(canvas: Canvas) -> list[int]:
    return [place for place, token in enumerate(canvas) if token == MASK]


def rps(k: int, tokens: int, mass: float, ratio: float, trust: float) -> tuple[Any, Any]:
    """Ripple-Pivot Search (arXiv 2608.11742): several tokens at one half-certain position; minus the mean entropy of
    the other masks, plus trust times log p of the token in the branch where the pivot is a mask."""

    def kept(told: Told, place: int) -> list[float]:
        return [float(share) for share in told[3 + tokens : 3 + 2 * tokens, place]]

    def spawn(canvas: Canvas, told: Told) -> list[Fill]:
        able = [place for place in masks_of(canvas) if sum(kept(told, place)) >= mass]
        if not able:
            return []
        pivot = max(able, key=lambda place: sum(-share * np.log(share) for share in kept(told, place)))
        least = np.float32(ratio) * told[1, pivot]
        likely = [each for each in range(tokens) if told[3 + tokens + each, pivot] >= least]
        return [(pivot, int(told[3 + each, pivot])) for each in likely][:k]

    def scores(branches: list[Canvas], told: list[Told], fills: list[Fill]) -> list[float]:
        pivots = {place for place, _ in fills}
        found = []
        for branch, own, token in zip(branches, told, [*(token for _, token in fills), None], strict=True):
            entropies = [-float(own[2, place]) for place in masks_of(branch) if place not in pivots]
            mean, likely = sum(entropies) / max(len(entropies), 1), 1.0
            if token is not None:
                (pivot,) = pivots
                shares = dict(zip(told[-1][3 : 3 + tokens, pivot], told[-1][3 + tokens :, pivot], strict=True))
                likely = float(shares.get(token, 0.0))
            found.append(-mean + trust * np.log(max(likely, 1e-30)))
        return found

    return spawn, scores


def ete(k: int, threshold: float) -> tuple[Any, Any]:
    """ETE (arXiv 2511.21103): masks near a probability of 0.2, and the branch that opens most; of equal ones the more
    certain."""

    def spawn(canvas: Canvas, told: Told) -> list[Fill]:
        near = sorted(masks_of(canvas), key=lambda place: abs(told[1, place] - np.float32(0.2)))
        return [(place, int(told[0, place])) for place in near[:k]]

    def scores(branches: list[Canvas], told: list[Told], fills: list[Fill]) -> list[float]:
        found = []
        for branch, own in zip(branches, told, strict=True):
            masks = masks_of(branch)
            mean = sum(float(own[2, place]) for place in masks) / len(masks) if masks else 1.0
            found.append(sum(own[1, place] > np.float32(threshold) for place in masks) + 1 / (2 - min(mean, 1.0)))
        return found

    return spawn, scores


def test_rps_tries_several_tokens_at_one_mask() -> None:
    wins = 0
    for seed in range(40):
        k, threshold, prompt = 1 + seed % 4, (0.8, 0.95)[seed % 2], [7, 8, 9]
        mass, ratio, trust = (0.5, 0.8)[seed % 2], (0.1, 0.5)[seed // 2 % 2], (0.02, 0.5)[seed // 4 % 2]
        wanted, passes = decoded_plainly(Attentive(seed, 0), prompt, 12, threshold, 4, *rps(k, 4, mass, ratio, trust))
        done = decoded_as(
            wanted, passes, seed, num_lookahead=k, skip_threshold=threshold, branch_score=f"ripple(trust={trust})",
            spawn_rule=f"pivot(tokens=4, mass={mass}, ratio={ratio})",
        )  # fmt: skip
        wins += sum(winner > 1 for winner in done.winner_per_step)
    assert wins > 5, "other tokens than the best"


@pytest.mark.parametrize("variance", [0.0, 0.02, 1.0])
def test_ete_and_adalook_s_stop(variance: float) -> None:
    num_rows = []
    for seed in range(40):
        k, threshold, prompt = 2 + seed % 4, (0.8, 0.95)[seed % 2], [7, 8, 9]

        def goes_on(scores: list[float]) -> bool:
            return len(scores) < 2 or bool(np.var(scores) >= variance)

        wanted, passes = decoded_plainly(
            Attentive(seed, 0), prompt, 12, threshold, 0, *ete(k, threshold), goes_on=goes_on
        )
        done = decoded_as(
            wanted, passes, seed, num_lookahead=k, skip_threshold=threshold, spawn_rule="near(probability=0.2)",
            branch_score="num_sure", lookahead_rule=f"disputed(variance={variance})",
        )  # fmt: skip
        num_rows.append(done.num_rows / passes)
    assert (np.mean(num_rows) > 2.5) == (variance < 1)


def test_a_grid_tries_the_best_tokens_of_each_of_the_first_masks() -> None:
    decode = DecodeConfig(
        strategy="vanilla", max_new_tokens=8, num_lookahead=5, spawn_rule="confident(tokens=2, ratio=0.3)",
        skip_threshold=1.0, stop_at_eos=False,
    )  # fmt: skip
    found = Decoded(decode, ModelFacts(0), [3], Attentive(1, 0), watches=True)
    told = Attentive(1, 0).read([7, 8, 9] + [MASK] * 8, 2)
    record = found.records[0]
    (first,) = record.filled
    order = sorted((place for place in range(3, 11) if place != first), key=lambda place: -told[2, place])[:3]
    pairs = [(place, int(told[3 + each, place])) for place in order for each in range(2)]
    assert [branch.fills for branch in record.lookahead] == [(pair,) for pair in pairs[:5]]


def test_several_tokens_where_none_are_told_are_refused_in_a_sentence() -> None:
    for changes, sentence in (
        ({"temperature": 0.5}, "set temperature to 0"),
        ({"strategy": "levenshtein"}, "edit tokens"),
        ({"mask_probability": "counted"}, "remove cfg_scale"),
        ({"sampling_strategy": "logit_margin"}, "set sampling_strategy"),
        ({"spawn_rule": "nested(tokens=2)"}, "nested drafts have one a mask"),
    ):
        with pytest.raises(ValidationError, match=sentence):
            DecodeConfig.model_validate({"spawn_rule": "pivot", **changes})
    scheduler = Scheduler(DecodeConfig(), mask_token_id=MASK, eos_token_id=None)
    assert "its spawn_rule's tokens 4 cannot share" in str(scheduler.why_apart(DecodeConfig(spawn_rule="pivot")))
