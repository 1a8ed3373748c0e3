"""Which operations a model of given linears calls: only these may stop a run."""

from __future__ import annotations

from collections.abc import Collection

_ALWAYS = frozenset({"rms_norm", "add_rms_norm", "split_and_rotate", "write_kv", "paged_attention"})
_BY_SCHEME = {
    "FLOAT": frozenset({"swiglu"}),
    "W8A8": frozenset({"swiglu", "static_quant", "quant_matmul"}),
    "W8A8_DYNAMIC": frozenset(
        {"add_rms_norm_dynamic_quant", "dynamic_quant", "quant_matmul", "quant_matmul_int32", "dequant_swiglu_quant"}
    ),
}


def called_operations(schemes: Collection[str]) -> frozenset[str]:
    """schemes: those of the decoder layers' linears, as common.runtime.linear_schemes names them."""
    return _ALWAYS.union(*(_BY_SCHEME[scheme] for scheme in schemes))
