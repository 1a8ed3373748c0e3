"""How the linears of the decoder layers will be computed, known before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from common.checkpoint import ModelConfig, quantizable
from common.config import DeviceProfile
from quant.folder import FLOAT, schemes_of
from quant.layout import is_quantized_folder
from quant.scheme import Scheme

SCHEME_AT_LOAD: dict[str, Scheme] = {"w8a8": "w8a8_dynamic", "fp8": "fp8"}  # by the profile's `quantization`


def scheme_at_load(profile: DeviceProfile) -> str:
    """The scheme of a float checkpoint's linears, named as in quantized folders."""
    return FLOAT if profile.quantization is None else SCHEME_AT_LOAD[profile.quantization].upper()


def linear_schemes(
    profile: DeviceProfile, model: str | Path, config: ModelConfig, load_format: str = "auto"
) -> dict[str, str]:
    """Return FLOAT, W8A8 (static), W8A8_DYNAMIC or FP8 of every linear by its name, e.g. layers.3.qkv_proj. Raises
    QuantizationError for a damaged folder."""
    layout = quantizable(config)
    if load_format == "auto" and is_quantized_folder(model):
        return schemes_of(model, layout)
    scheme = scheme_at_load(profile)
    return {str(linear): FLOAT if linear.stays_float else scheme for linear in layout.linears}
