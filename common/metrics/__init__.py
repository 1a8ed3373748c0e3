"""What is counted, and what is right: the record of a request, the numbers of a run with their definitions, the marking
of answers, and where the numbers come from.
"""

from common.metrics.fingerprint import fingerprint
from common.metrics.records import DEFINITIONS, request_record
from common.metrics.scoring import score, standard_error
from common.metrics.summary import area_under_accuracy, summarize, summarize_start

__all__ = [
    "DEFINITIONS",
    "area_under_accuracy",
    "fingerprint",
    "request_record",
    "score",
    "standard_error",
    "summarize",
    "summarize_start",
]
