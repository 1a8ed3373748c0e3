"""The one table of benchmarks, by their names in `input.benchmark`."""

from __future__ import annotations

from common.config import BenchmarkName
from common.scoring.benchmarks.benchmark import Benchmark
from common.scoring.benchmarks.gsm8k import GSM8K
from common.scoring.benchmarks.humaneval import HUMANEVAL, HUMANEVAL_INSTRUCT, HUMANEVAL_PLUS
from common.scoring.benchmarks.math import MATH, MATH_PLAIN
from common.scoring.benchmarks.mbpp import MBPP, MBPP_PLUS

BENCHMARKS: dict[BenchmarkName, Benchmark] = {
    "gsm8k": GSM8K,
    "math": MATH,
    "math_plain": MATH_PLAIN,
    "humaneval": HUMANEVAL,
    "humaneval_instruct": HUMANEVAL_INSTRUCT,
    "humaneval_plus": HUMANEVAL_PLUS,
    "mbpp": MBPP,
    "mbpp_plus": MBPP_PLUS,
}
