"""Measure speed: steps beside the device's floors, the host's part, and many requests at once; and predict a step's
time without the hardware (`estimate`).
"""

from common.bench.estimate.mesh import fastest_mesh
from common.bench.estimate.scenario import Options
from common.bench.estimate.schemes import tell_schemes
from common.bench.estimate.tables import estimate_tables
from common.bench.host import HostOptions, HostSizes, measure_host, measure_marking
from common.bench.load import LoadOptions, Setting
from common.bench.report import compare
from common.bench.requests import measure_requests
from common.bench.serving import measure_serving
from common.bench.steps import BenchOptions, run_bench
from common.bench.throughput import measure_throughput

__all__ = [
    "BenchOptions",
    "HostOptions",
    "HostSizes",
    "LoadOptions",
    "Options",
    "Setting",
    "compare",
    "estimate_tables",
    "fastest_mesh",
    "measure_host",
    "measure_marking",
    "measure_requests",
    "measure_serving",
    "measure_throughput",
    "run_bench",
    "tell_schemes",
]
