"""The model: decoder layers over injected operators, the plain version of each operator, and what is made of logits."""

from common.model.decoder import Decoder, build_decoder
from common.model.moe import Routing, best_columns, choose_experts, mixture, route
from common.model.noise import (
    NUM_SAMPLING_FIELDS,
    UNIFORM_SCALE,
    SamplingRows,
    column_keys,
    gumbel_noise,
    noise_bits,
    sampling_fields,
)
from common.model.ops import Activation, Ops, add_rms_norm, attention, rms_norm, rotary_table, rotate, swiglu
from common.model.parameters import Linear, MoE, QKNorm, RMSNorm
from common.model.sampling import (
    NEVER,
    NUM_STATISTICS,
    Gather,
    cut_edge,
    merge_sampled,
    merge_statistics,
    sampled_statistics,
    shard_statistics,
)
from common.model.special import best_statistics, changed_logits, special_statistics

__all__ = [
    "NEVER",
    "NUM_SAMPLING_FIELDS",
    "NUM_STATISTICS",
    "UNIFORM_SCALE",
    "Activation",
    "Decoder",
    "Gather",
    "Linear",
    "MoE",
    "Ops",
    "QKNorm",
    "RMSNorm",
    "Routing",
    "SamplingRows",
    "add_rms_norm",
    "attention",
    "best_columns",
    "best_statistics",
    "build_decoder",
    "changed_logits",
    "choose_experts",
    "column_keys",
    "cut_edge",
    "gumbel_noise",
    "merge_sampled",
    "merge_statistics",
    "mixture",
    "noise_bits",
    "rms_norm",
    "rotary_table",
    "rotate",
    "route",
    "sampled_statistics",
    "sampling_fields",
    "shard_statistics",
    "special_statistics",
    "swiglu",
]
