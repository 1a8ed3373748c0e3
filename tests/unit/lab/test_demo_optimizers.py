"""The optimisation of the demo training: the learning rate over time, and Muon."""

from __future__ import annotations

import pytest
import torch
from demo_training.optimizers import learning_rate_factor, orthogonalize
from demo_training.recipe import Recipe


def test_the_time_budget_ends_the_learning_rate_at_zero() -> None:
    recipe = Recipe()
    late = 10 * recipe.warmup_steps
    assert learning_rate_factor(0.0, 0, recipe) == pytest.approx(1 / recipe.warmup_steps)
    assert learning_rate_factor(recipe.constant_share, late, recipe) == 1.0
    assert learning_rate_factor(1.0, late, recipe) == 0.0


def test_muon_makes_a_step_of_unit_singular_values() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, 32, 64)).float())
    assert values.min() > 0.5 and values.max() < 1.4
