"""What a step does with each request's branches: blocks and windows, rows of a pass, scores and winners, fills, new
lookaheads, ends. Pure host code; `scheduler` is where to begin.
"""

from common.decoding.scheduling.pacing import Pacer
from common.decoding.scheduling.rules import DREAM, FindStop, ModelFacts
from common.decoding.scheduling.scheduler import Scheduler
from common.decoding.scheduling.state import Branch, Candidate, DecodingRequest, Revision, StepRecord
from common.decoding.scheduling.warm import host_seconds, start_warming, warm_up

__all__ = [
    "DREAM",
    "Branch",
    "Candidate",
    "DecodingRequest",
    "FindStop",
    "ModelFacts",
    "Pacer",
    "Revision",
    "Scheduler",
    "StepRecord",
    "host_seconds",
    "start_warming",
    "warm_up",
]
