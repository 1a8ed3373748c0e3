"""What is counted, and what is right: the record of a request, the numbers of a run with their definitions, the marking
of answers by programs that are kept from harm, and where the numbers come from.
"""

from common.metrics.fingerprint import fingerprint
from common.metrics.flat import flat_numbers
from common.metrics.isolation import Isolation, code_isolation, isolation, program_scorer
from common.metrics.numbers import final_number, plain, whole_number
from common.metrics.program_text import program_of
from common.metrics.programs import NotStarted, library_folders, run_program
from common.metrics.records import DEFINITIONS, request_record
from common.metrics.scoring import answer_of, score, standard_error
from common.metrics.suites import passes
from common.metrics.summary import area_under_accuracy, summarize, summarize_start

__all__ = [
    "DEFINITIONS",
    "Isolation",
    "NotStarted",
    "answer_of",
    "area_under_accuracy",
    "code_isolation",
    "final_number",
    "fingerprint",
    "flat_numbers",
    "isolation",
    "library_folders",
    "passes",
    "plain",
    "program_of",
    "program_scorer",
    "request_record",
    "run_program",
    "score",
    "standard_error",
    "summarize",
    "summarize_start",
    "whole_number",
]
