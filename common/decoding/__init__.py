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
    TakesOrders,
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
)
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
from common.decoding.relay import Command, Hold, Relay
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
    "FIRST_VERSION",
    "NUM_UPLOADED_FIELDS",
    "TAGS",
    "Bool",
    "Branch",
    "Candidate",
    "Capacity",
    "Command",
    "CommitSpan",
    "Completion",
    "DropWeights",
    "Engine",
    "EngineCore",
    "FindStop",
    "ForgetKV",
    "GenerationRequest",
    "GivesLogprobs",
    "Hold",
    "Int",
    "Likelihood",
    "Logprobs",
    "ModelFacts",
    "Order",
    "PassCosts",
    "PredictionOrder",
    "Predictions",
    "PutWeights",
    "QueuesForwards",
    "ReadWeights",
    "Rejection",
    "Relay",
    "ReleaseMemory",
    "RequestOutput",
    "ResumeMemory",
    "Room",
    "RowField",
    "Sampling",
    "SamplingField",
    "Scheduler",
    "StepPlan",
    "StepRecord",
    "Tag",
    "TakesOrders",
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
    "why_not_routed",
]
