"""Every decoding strategy is chosen by name in each function of `scheduling/strategies`, or is known to be its rest."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from common.config import strategies as sections
from common.decoding.scheduling import strategies
from common.policies.settings import STRATEGIES

WHOLE_CANVAS = {"fast_dllm", "vanilla"}
REST = {
    "begin": WHOLE_CANVAS,
    "opens": WHOLE_CANVAS | {"fast_dllm_v2"},
    "open_block": WHOLE_CANVAS | {"d2f", "multi_block"},
    "window": WHOLE_CANVAS,
    "fillable": WHOLE_CANVAS,
    "settle": WHOLE_CANVAS,
    "is_done": WHOLE_CANVAS,
    "final_end": WHOLE_CANVAS | {"d2f", "multi_block"},
}
CHOOSING = {node.name: node for node in ast.parse(Path(strategies.__file__).read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef)}  # fmt: skip


def test_these_are_the_functions_of_a_strategy() -> None:
    assert CHOOSING.keys() == REST.keys()


def test_every_strategy_has_its_settings() -> None:
    assert tuple(sections.STRATEGIES) == STRATEGIES


@pytest.mark.parametrize("name", REST)
def test_a_new_strategy_does_not_become_another_unseen(name: str) -> None:
    named = {node.id.lower() for node in ast.walk(CHOOSING[name]) if isinstance(node, ast.Name) and node.id.isupper()}
    unnamed = set(STRATEGIES) - named
    assert unnamed == REST[name], f"{name} takes {unnamed} for its last line: name what is new there, or in REST"
