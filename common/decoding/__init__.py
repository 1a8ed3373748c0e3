"""How text is decoded: requests, blocks, branches, the scheduler over them, and the main loop (`core.EngineCore`).

Plain numpy on the host; no torch, no device. An engine (`engine.py`) takes a `StepPlan` a step and returns
`Predictions`.
"""

from common.decoding.core import EngineCore
from common.decoding.engine import (
    Capacity,
    Engine,
    GivesLogprobs,
    PassCosts,
    QueuesForwards,
    Room,
    start_forward,
    why_not_routed,
)
from common.decoding.likelihood import Likelihood, TextScorer
from common.decoding.loop import decode_requests
from common.decoding.plan import (
    NUM_UPLOADED_FIELDS,
    Bool,
    CommitSpan,
    Int,
    Logprobs,
    Predictions,
    RowField,
    Sampling,
    SamplingField,
    StepPlan,
    entries_from,
)
from common.decoding.ranks import PredictionOrder, assign_rows, rows_by_rank
from common.decoding.relay import Command, Relay
from common.decoding.request import Completion, GenerationRequest, Rejection, RequestOutput, TokenLogprob
from common.decoding.scheduling import (
    DREAM,
    Branch,
    Candidate,
    FindStop,
    ModelFacts,
    Scheduler,
    StepRecord,
    host_seconds,
    start_warming,
)
from common.decoding.wrapped import WrappedEngine

__all__ = [
    "DREAM",
    "NUM_UPLOADED_FIELDS",
    "Bool",
    "Branch",
    "Candidate",
    "Capacity",
    "Command",
    "CommitSpan",
    "Completion",
    "Engine",
    "EngineCore",
    "FindStop",
    "GenerationRequest",
    "GivesLogprobs",
    "Int",
    "Likelihood",
    "Logprobs",
    "ModelFacts",
    "PassCosts",
    "PredictionOrder",
    "Predictions",
    "QueuesForwards",
    "Rejection",
    "Relay",
    "RequestOutput",
    "Room",
    "RowField",
    "Sampling",
    "SamplingField",
    "Scheduler",
    "StepPlan",
    "StepRecord",
    "TextScorer",
    "TokenLogprob",
    "WrappedEngine",
    "assign_rows",
    "decode_requests",
    "entries_from",
    "host_seconds",
    "rows_by_rank",
    "start_forward",
    "start_warming",
    "why_not_routed",
]
