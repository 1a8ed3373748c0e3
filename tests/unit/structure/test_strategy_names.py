"""Every decoding strategy has its settings, a module of loops, and a place in the order of codes."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from common.config import strategies as sections
from common.decoding.scheduling import strategies
from common.policies.settings import STRATEGIES

FUNCTIONS = {"begin", "opens", "open_block", "window", "fillable", "settle", "is_done", "final_end"}
USUAL = {"opens", "open_block", "final_end"}  # what `blocks` has for those that do not say it


def test_every_strategy_has_its_settings_and_its_loops() -> None:
    assert tuple(sections.STRATEGIES) == STRATEGIES
    assert set(strategies.MODULES) == set(STRATEGIES)


@pytest.mark.parametrize("name", STRATEGIES)
def test_settings_take_every_strategy_by_its_name(name: str) -> None:
    kind = sections.STRATEGIES[name]
    assert isinstance(TypeAdapter(sections.AnyStrategy).validate_python({"name": name}), kind)
    assert kind.model_fields["name"].default == name


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_says_all_that_has_no_usual_answer(name: str) -> None:
    said = {function for module in strategies.MODULES[name] for function in vars(module)}
    assert said >= FUNCTIONS - USUAL
    assert set(vars(strategies.blocks)) & FUNCTIONS == USUAL


def test_these_are_the_functions_of_a_strategy() -> None:
    assert set(vars(strategies)) >= FUNCTIONS
