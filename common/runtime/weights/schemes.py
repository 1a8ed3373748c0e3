"""How the linears of the decoder layers will be computed, known before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from common.config import DeviceProfile
from quant.folder import FLOAT, schemes_of
from quant.layout import is_quantized_folder
from quant.names import LINEARS, LinearName
from quant.scheme import Scheme

SCHEME_AT_LOAD: dict[str, Scheme] = {"w8a8": "w8a8_dynamic", "fp8": "fp8"}  # by the profile's `quantization`


def scheme_at_load(profile: DeviceProfile) -> str:
    """The scheme of a float checkpoint's linears, named as in quantized folders."""
    return FLOAT if profile.quantization is None else SCHEME_AT_LOAD[profile.quantization].upper()


def linear_schemes(
    profile: DeviceProfile, model: str | Path, num_layers: int, load_format: str = "auto"
) -> dict[LinearName, str]:
    """Return FLOAT, W8A8 (static), W8A8_DYNAMIC or FP8 of every linear. Raises QuantizationError for a damaged
    folder."""
    if load_format == "auto" and is_quantized_folder(model):
        return schemes_of(model)
    scheme = scheme_at_load(profile)
    return {LinearName(layer, kind): scheme for layer in range(num_layers) for kind in LINEARS}
