"""Scoring: what is right, and what is counted. Benchmarks with their prompts, the marking of answers, the record of a
request, the numbers of a run with their definitions, and where the numbers come from.

`marking` says of an answer whether it is right: by its row's own result (`own_results`) or by its benchmark's rules
(`benchmarks`). Both compare by `results`, and run programs by `programs`.
"""

from common.scoring.benchmarks.benchmark import Row
from common.scoring.benchmarks.task import BENCHMARKS, BenchmarkTask, task_of
from common.scoring.fingerprint import fingerprint
from common.scoring.marking import require_markable
from common.scoring.marking_pool import MarkingPool
from common.scoring.own_results import score
from common.scoring.programs.isolation import isolation
from common.scoring.records import DEFINITIONS, request_record
from common.scoring.summary import area_under_accuracy, flat_numbers, standard_error, summarize, summarize_start

__all__ = [
    "BENCHMARKS",
    "DEFINITIONS",
    "BenchmarkTask",
    "MarkingPool",
    "Row",
    "area_under_accuracy",
    "fingerprint",
    "flat_numbers",
    "isolation",
    "request_record",
    "require_markable",
    "score",
    "standard_error",
    "summarize",
    "summarize_start",
    "task_of",
]
