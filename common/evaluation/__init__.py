"""Is it right: several settings on one input with a table of them, golden traces replayed step by step, and the trace
of one prompt."""

from common.evaluation.parity import replay_files
from common.evaluation.record import record_trace
from common.evaluation.sweep import evaluate_sweep

__all__ = [
    "evaluate_sweep",
    "record_trace",
    "replay_files",
]
