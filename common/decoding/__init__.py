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
    PrefixRoot,
    Room,
    carry_out,
    start_forward,
    taking_orders,
    why_not_routed,
)
from common.decoding.likelihood import Likelihood, TextScorer
from common.decoding.loop import decode_requests
from common.decoding.orders import (
    FIRST_VERSION,
    TAGS,
    DropWeights,
    ForgetKV,
    Order,
    PutWeights,
    ReadWeights,
    ReleaseMemory,
    ResumeMemory,
    Tag,
    TakeMemory,
)
from common.decoding.plan import (
    NUM_UPLOADED_FIELDS,
    Bool,
    ClassField,
    ClassStatistics,
    CommitSpan,
    Int,
    Logprobs,
    Predictions,
    RowField,
    Sampling,
    StepPlan,
    entries_from,
)
from common.decoding.ranks import PredictionOrder, assign_rows, rows_by_rank
from common.decoding.relay import Command, Hold, Relay
from common.decoding.request import HOLE, Completion, GenerationRequest, Rejection, RequestOutput, TokenLogprob
from common.decoding.scheduling.pacing import Pacer
from common.decoding.scheduling.rules import DREAM, ModelFacts
from common.decoding.scheduling.scheduler import Scheduler
from common.decoding.scheduling.state import Branch, Revision, StepRecord
from common.decoding.scheduling.warm import host_seconds, start_warming, warm_up
from common.decoding.wrapped import WrappedEngine

__all__ = [
    "DREAM",
    "FIRST_VERSION",
    "HOLE",
    "NUM_UPLOADED_FIELDS",
    "TAGS",
    "Bool",
    "Branch",
    "Capacity",
    "ClassField",
    "ClassStatistics",
    "Command",
    "CommitSpan",
    "Completion",
    "DropWeights",
    "Engine",
    "EngineCore",
    "ForgetKV",
    "GenerationRequest",
    "GivesLogprobs",
    "Hold",
    "Int",
    "Likelihood",
    "Logprobs",
    "ModelFacts",
    "Order",
    "Pacer",
    "PassCosts",
    "PredictionOrder",
    "Predictions",
    "PrefixRoot",
    "PutWeights",
    "ReadWeights",
    "Rejection",
    "Relay",
    "ReleaseMemory",
    "RequestOutput",
    "ResumeMemory",
    "Revision",
    "Room",
    "RowField",
    "Sampling",
    "Scheduler",
    "StepPlan",
    "StepRecord",
    "Tag",
    "TakeMemory",
    "TextScorer",
    "TokenLogprob",
    "WrappedEngine",
    "assign_rows",
    "carry_out",
    "decode_requests",
    "entries_from",
    "host_seconds",
    "rows_by_rank",
    "start_forward",
    "start_warming",
    "taking_orders",
    "warm_up",
    "why_not_routed",
]
