"""The linears of a model as one rank holds them, told from its config before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from common.checkpoint import ModelConfig, shard_bounds
from common.config import DeviceProfile, RunConfig
from common.runtime import linear_schemes, scheme_at_load
from lopa_cuda.tiles.table import Fusion, Kind, LinearShape
from quant.folder import FLOAT

_KINDS: dict[str, Kind] = {FLOAT: "bf16", "FP8": "fp8"}  # the other schemes are of 8-bit integers


class ModelLinear(NamedTuple):
    """name: `qkv`, `o`, `gate_up`, `down`, those of shared experts, or `head`: which stage follows depends on it."""

    name: str
    shape: LinearShape


def model_linears(
    profile: DeviceProfile, run: RunConfig, config: ModelConfig, tp_size: int, tp_rank: int = 0
) -> tuple[ModelLinear, ...]:
    """Every shape of linear once, in the order of a layer, the head last. Experts that are routed to are no linears.

    Raises QuantizationError for a damaged quantized folder.
    """
    schemes = linear_schemes(profile, run.model, config, run.load_format)
    found: dict[LinearShape, ModelLinear] = {}
    for layer in range(config.num_layers):
        for name, num_out, num_in, fusion in _layer(config, layer, tp_size):
            scheme = schemes.get(f"layers.{layer}.{name}_proj", FLOAT)
            shape = LinearShape(_KINDS.get(scheme, "int8"), num_out, num_in, fusion)
            found.setdefault(shape, ModelLinear(name, shape))
    first, end = shard_bounds(config.vocab_size, tp_rank, tp_size)
    kind = _KINDS.get(scheme_at_load(profile), "int8") if profile.quantize_lm_head else "bf16"
    head = LinearShape(kind, end - first, config.hidden_size, "none")
    found.setdefault(head, ModelLinear("head", head))
    return tuple(found.values())


def _layer(config: ModelConfig, layer: int, tp_size: int) -> Iterator[tuple[str, int, int, Fusion]]:
    width, queries = config.hidden_size, config.num_heads // tp_size
    heads = queries + 2 * config.kv_heads_of_rank(tp_size)
    yield "qkv", heads * config.head_size, width, "none"
    yield "o", width, queries * config.head_size, "none"
    if config.moe is None or not config.is_moe_layer(layer):
        inner = config.intermediate_size // tp_size
        yield "gate_up", 2 * inner, width, "swiglu"
        yield "down", width, inner, "none"
    elif config.moe.num_shared_experts:
        shared = config.moe.intermediate_size * config.moe.num_shared_experts // tp_size
        yield "shared_gate_up", 2 * shared, width, "swiglu"
        yield "shared_down", width, shared, "none"
