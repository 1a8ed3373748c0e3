"""Is it right: several settings on one input with a table of them, and golden traces replayed step by step."""

from common.evaluation.parity import replay_files
from common.evaluation.sweep import evaluate_sweep

__all__ = [
    "evaluate_sweep",
    "replay_files",
]
