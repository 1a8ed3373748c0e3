"""What the scheduler has to know of a model."""

from __future__ import annotations

from common.checkpoint import ModelConfig
from common.decoding import ModelFacts


def facts_of(config: ModelConfig) -> ModelFacts:
    """Return the facts. Dream ends at the first of its end tokens, as its published code does; the others at any."""
    return ModelFacts(config.shift, () if config.family == "dream" else config.stop_token_ids[1:], config.edit_ids)
