"""Rules that ship, asked by name about what policies of other packages are given."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.config import DecodeConfig
from common.decoding.scheduling.rules import Rules, no_stop_strings
from common.policies import Filling, Scoring, Stepped, branch_scores, fill_rules, lookahead_rules


def settings_of(decode: DecodeConfig, **rule: str) -> Any:
    """Return the record that the loops read."""
    return Rules.of(decode.model_copy(update=rule), None, no_stop_strings).record[0]


def score(name: str, scoring: Scoring) -> Any:
    settings, width = settings_of(scoring.settings, branch_score=name), scoring.is_masked_BW.shape[1]
    likely_B, is_agreed_B, score_B = scoring.likely_B, scoring.is_agreed_B, []
    for branch, is_masked_W in enumerate(scoring.is_masked_BW):
        is_left_W = is_masked_W.copy()
        if name.startswith("ripple"):
            is_left_W[[position - scoring.start for one in scoring.branches for position, _ in one.fills]] = False
        column_M, num_fills = is_left_W.nonzero()[0], len(scoring.branches[branch].fills)
        values_2M = scoring.values_3BW[1:, branch, column_M]
        left = branch_scores.Left(column_M, *values_2M, np.zeros(width + 1))
        tried = branch_scores.Tried(num_fills, float(likely_B[branch]), bool(is_agreed_B[branch]), 0.5, width)
        score_B.append(branch_scores.score_of(left, tried, settings))
    return np.array(score_B)


def choose(name: str, filling: Filling) -> list[int]:
    """Return the places of the masks to fill."""
    token_BM = filling.values_3BM[0]
    agreed_M = (token_BM == token_BM[filling.winner]).mean(axis=0)
    is_chosen_M, order_M = np.zeros(len(agreed_M), np.bool_), np.zeros(len(agreed_M), np.int64)
    masks = fill_rules.Masks(filling.probability_M, filling.confidence_M, agreed_M, order_M, filling.quota)
    fill_rules.choose(masks, settings_of(filling.settings, fill_rule=name), is_chosen_M)
    return is_chosen_M.nonzero()[0].tolist()


def count(name: str, stepped: Stepped) -> int:
    settings = settings_of(stepped.settings, lookahead_rule=name)
    return lookahead_rules.count(stepped.num_filled, stepped.num_masked, stepped.variance, settings)
