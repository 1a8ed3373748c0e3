"""Traces of the published decoding code of other model families, replayed pass by pass: LLaDA, SDAR, Fast-dLLM v2,
LLaDA2. `settings` is where their names become ours.
"""

from common.evaluation.families.compare import first_difference
from common.evaluation.families.settings import settings_of
from common.evaluation.families.trace import FamilyTrace, is_family_trace, read_family_trace

__all__ = ["FamilyTrace", "first_difference", "is_family_trace", "read_family_trace", "settings_of"]
