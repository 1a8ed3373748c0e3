"""How text is decoded: requests, blocks, branches, the scheduler over them, and the main loop (`loop.decode_requests`).

Plain numpy on the host; no torch, no device. The hardware stands behind the contract in `engine`; a step goes there as
a `StepPlan` and comes back as `Predictions`.
"""

from common.decoding.ending import FindStop, without_stop
from common.decoding.engine import Capacity, Engine
from common.decoding.layout import UNBOUNDED
from common.decoding.loop import decode_requests
from common.decoding.plan import (
    NUM_UPLOADED_FIELDS,
    CommitSpan,
    Int,
    Predictions,
    RowField,
    Sampling,
    StepPlan,
    assign_rows,
)
from common.decoding.request import Completion, GenerationRequest, Rejection
from common.decoding.scheduler import Scheduler
from common.decoding.state import StepRecord
from common.decoding.wrapped import WrappedEngine

__all__ = [
    "NUM_UPLOADED_FIELDS",
    "UNBOUNDED",
    "Capacity",
    "CommitSpan",
    "Completion",
    "Engine",
    "FindStop",
    "GenerationRequest",
    "Int",
    "Predictions",
    "Rejection",
    "RowField",
    "Sampling",
    "Scheduler",
    "StepPlan",
    "StepRecord",
    "WrappedEngine",
    "assign_rows",
    "decode_requests",
    "without_stop",
]
