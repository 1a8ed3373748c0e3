"""Generated problems for the demo checkpoint: training samples by seed and the held-out sets beside the model."""

from .dataset import (
    CANVAS_TOKENS,
    MAX_PROMPT_TOKENS,
    PROMPT_END,
    SPLIT_PATTERN,
    TokenizedSamples,
    held_out_code,
    held_out_math,
    held_out_new_templates,
    is_held_out,
    tokenize_samples,
    training_pairs,
    word_encoder,
)

__all__ = [
    "CANVAS_TOKENS",
    "MAX_PROMPT_TOKENS",
    "PROMPT_END",
    "SPLIT_PATTERN",
    "TokenizedSamples",
    "held_out_code",
    "held_out_math",
    "held_out_new_templates",
    "is_held_out",
    "tokenize_samples",
    "training_pairs",
    "word_encoder",
]
