"""How many linears are dynamic, static and float, and what those that are not dynamic cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from common.bench.estimate.cost import estimate_step
from common.bench.estimate.hardware import hardware_of
from common.bench.estimate.scenario import Options, setup_of
from common.checkpoint import ModelConfig
from common.config import DeviceProfile, RunConfig
from common.errors import ConfigError

_NAMES = {"W8A8_DYNAMIC": "dynamic", "W8A8": "static", "FLOAT": "float", "FP8": "fp8"}


def tell_schemes(profile: DeviceProfile, run: RunConfig, config: ModelConfig, scheme_of: Mapping[str, str]) -> str:
    """One sentence: numbers of linears beside experts, and milliseconds a step by `lopa estimate` where some are not
    dynamic."""
    scheme_of = {name: scheme for name, scheme in scheme_of.items() if ".moe." not in name}
    counts = Counter(scheme_of.values())
    told = ", ".join(f"{counts[scheme]} {name}" for scheme, name in _NAMES.items() if counts[scheme] or scheme != "FP8")
    sentence = f"{len(scheme_of)} linears of decoder layers: {told}"
    if set(counts) <= {"W8A8_DYNAMIC", "FP8"}:
        return sentence
    try:
        costs = costs_ms(profile, run, config, scheme_of)
    except ConfigError as error:  # a device that no file describes, or a mesh that only its machine decides
        return f"{sentence} (no estimate: {error})"
    parts = [f"{name} ones cost {ms:.2f} ms" for name, ms in costs.items() if ms >= 0.005]
    if not parts:
        return sentence
    return f"{sentence}; by lopa estimate {' and '.join(parts)} a step against dynamic ones"


def costs_ms(
    profile: DeviceProfile, run: RunConfig, config: ModelConfig, scheme_of: Mapping[str, str]
) -> dict[str, float]:
    """Return what float and static linears cost, each as if all were so, times their share of the layers' weights.

    Float ones read twice the bytes; static ones go without the fused norm and quantization. Raises ConfigError.
    """
    hardware = hardware_of(profile)
    dynamic = replace(setup_of(profile, run, config, Options()), linear_dtype="int8")
    static = replace(dynamic, launches=replace(dynamic.launches, fuses_norm_quant=False))
    others = {"FLOAT": replace(dynamic, linear_dtype=profile.dtype), "W8A8": static}
    weights = Counter[str]()
    for linear, scheme in scheme_of.items():
        weights[scheme] += _num_weights(config, linear.rpartition(".")[2])
    base_ms, total = estimate_step(dynamic, hardware).ms, weights.total()
    return {
        _NAMES[scheme]: (estimate_step(setup, hardware).ms - base_ms) * weights[scheme] / total
        for scheme, setup in others.items()
    }


def _num_weights(config: ModelConfig, kind: str) -> int:
    heads, inner = config.num_heads * config.head_size, config.intermediate_size
    outputs = {
        "qkv_proj": heads + 2 * config.num_kv_heads * config.head_size,
        "o_proj": heads,
        "gate_up_proj": 2 * inner,
        "down_proj": inner,
    }
    return outputs[kind] * config.hidden_size
