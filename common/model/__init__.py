"""The model's maths, once: decoder layers over injected operators, the plain version of each operator, and what becomes
of logits.
"""

from common.model.dream import Dream, build_dream
from common.model.noise import (
    NUM_SAMPLING_FIELDS,
    UNIFORM_SCALE,
    Int32,
    SamplingRows,
    column_keys,
    noise_bits,
    sampling_fields,
)
from common.model.ops import Activation, Linear, Ops, RMSNorm, add_rms_norm, attention, rotary_table, rotate, swiglu
from common.model.sampling import (
    NUM_STATISTICS,
    Gather,
    cut_edge,
    merge_sampled,
    merge_statistics,
    sampled_statistics,
    shard_statistics,
)

__all__ = [
    "NUM_SAMPLING_FIELDS",
    "NUM_STATISTICS",
    "UNIFORM_SCALE",
    "Activation",
    "Dream",
    "Gather",
    "Int32",
    "Linear",
    "Ops",
    "RMSNorm",
    "SamplingRows",
    "add_rms_norm",
    "attention",
    "build_dream",
    "column_keys",
    "cut_edge",
    "merge_sampled",
    "merge_statistics",
    "noise_bits",
    "rotary_table",
    "rotate",
    "sampled_statistics",
    "sampling_fields",
    "shard_statistics",
    "swiglu",
]
