"""Check what is decoded: several settings on one input with a table of them, golden traces replayed step by step, the
trace of one prompt, and lm-eval with our model."""

from common.evaluation.board import Board
from common.evaluation.harness import drive
from common.evaluation.parity import replay_files
from common.evaluation.record import record_trace, request_of, watch
from common.evaluation.sweep import evaluate_sweep, print_board

__all__ = ["Board", "drive", "evaluate_sweep", "print_board", "record_trace", "replay_files", "request_of", "watch"]
