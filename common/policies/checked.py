"""Check what policies of other packages return before the scheduler uses it."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError, first_line
from common.policies.inputs import Filling, Scoring, Spawning, Stepped, Token


def checked(folder: str, setting: str, decide: Callable[..., Any]) -> Callable[..., Any]:
    """Return `decide` with ConfigErrors that name the setting, for what it raises and for answers of a wrong shape."""
    check = _CHECKS[folder]

    def decide_checked(given: Any) -> Any:
        try:
            return check(given, decide(given))
        except Exception as error:
            reason = f"{type(error).__name__}{_place_of(error)}: {first_line(error)}"
            where = f"decode.{folder.removesuffix('s')}: {setting}"
            raise ConfigError(f"{where}: the policy failed ({reason}): change its numbers or correct it") from error

    return decide_checked


def _place_of(error: Exception) -> str:
    """Return where a policy raised the error, ` at FILE:LINE`; nothing for what is said of its answer."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "" if last.filename == __file__ else f" at {Path(last.filename).name}:{last.lineno}"


def _score(given: Scoring, score_B: Any) -> Any:
    return _of_shape(score_B, len(given.branches))


def _rank(given: Spawning, rank_C: Any) -> Any:
    return _of_shape(rank_C, len(given.column_C))


def _choose(given: Filling, is_chosen_M: Any) -> Any:
    _of_shape(is_chosen_M, given.values_3BM.shape[2], ": a bool for each mask, not positions")
    if is_chosen_M.dtype != np.bool_:
        raise TypeError(f"it returned {is_chosen_M.dtype} where a bool for each mask was expected")
    if not is_chosen_M.any():
        raise ValueError("it chose no mask, and a step has to fill one")
    return is_chosen_M


def _count(given: Stepped, count: Any) -> int:
    most: int = given.settings.num_lookahead
    try:
        return min(max(operator.index(count), 0), most)
    except TypeError:
        raise TypeError(f"it returned {count!r:.40} where a whole number was expected (use round)") from None


def _confidence(given: Token, confidence_N: Any) -> Any:
    if getattr(confidence_N, "shape", None) != given.best.shape:
        raise TypeError(f"it returned {type(confidence_N).__name__} where a number for each position was expected")
    return confidence_N


def _of_shape(values: Any, length: int, meaning: str = "") -> Any:
    if not isinstance(values, np.ndarray) or values.shape != (length,):
        found = f"shape {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise TypeError(f"it returned {found} where a numpy array of shape ({length},) was expected{meaning}")
    if np.isnan(values).any():  # it would win or lose unseen
        raise ValueError("it returned NaN")
    return values


_CHECKS: dict[str, Callable[[Any, Any], Any]] = {
    "branch_scores": _score, "spawn_rules": _rank, "fill_rules": _choose, "lookahead_rules": _count,
    "token_confidences": _confidence,
}  # fmt: skip
