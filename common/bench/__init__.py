"""How fast is it: single shapes, whole decoding steps by part, tokens per second, beside the device's floors."""

from common.bench.report import beside, compare
from common.bench.run import BenchOptions, run_bench

__all__ = [
    "BenchOptions",
    "beside",
    "compare",
    "run_bench",
]
