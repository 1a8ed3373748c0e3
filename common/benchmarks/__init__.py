"""Public benchmarks: how a row of one becomes a prompt, and whether an answer to it is right.

A benchmark is a table of functions over rows (`Benchmark`), one module each. Prompts, stop strings and rules are those
of lm-eval's tasks of the same names. Programs run in the cell of `common.metrics`.
"""

from common.benchmarks.benchmark import Benchmark, Prompt, Row
from common.benchmarks.registry import BENCHMARKS
from common.benchmarks.task import BenchmarkTask, task_of

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "BenchmarkTask",
    "Prompt",
    "Row",
    "task_of",
]
