"""What is counted, and what is right: the record of a request, the numbers of a run with their definitions, the marking
of answers by programs that are kept from harm, and where the numbers come from.
"""

from common.metrics.fingerprint import fingerprint
from common.metrics.isolation import Isolation, code_isolation, isolation
from common.metrics.records import DEFINITIONS, request_record
from common.metrics.scoring import score, standard_error
from common.metrics.summary import area_under_accuracy, summarize, summarize_start

__all__ = [
    "DEFINITIONS",
    "Isolation",
    "area_under_accuracy",
    "code_isolation",
    "fingerprint",
    "isolation",
    "request_record",
    "score",
    "standard_error",
    "summarize",
    "summarize_start",
]
