"""The one table of benchmarks, by their names in `input.benchmark`."""

from __future__ import annotations

from common.benchmarks.benchmark import Benchmark
from common.benchmarks.gsm8k import GSM8K
from common.benchmarks.humaneval import HUMANEVAL, HUMANEVAL_INSTRUCT, HUMANEVAL_PLUS
from common.benchmarks.math import MATH, MATH_PLAIN
from common.benchmarks.mbpp import MBPP, MBPP_PLUS
from common.config import BenchmarkName

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
