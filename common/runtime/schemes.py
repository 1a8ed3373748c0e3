"""How the linears of the decoder layers will be computed, told before anything is loaded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from common.config import DeviceProfile
from quant.folder import FLOAT, count_linears, is_quantized_folder
from quant.names import LINEARS

_AT_LOAD = {None: FLOAT, "w8a8": "W8A8_DYNAMIC", "fp8": "FP8"}


def scheme_at_load(profile: DeviceProfile) -> str:
    """What becomes of a float checkpoint's linears, named as in quantized folders."""
    return _AT_LOAD[profile.quantization]


def count_schemes(
    profile: DeviceProfile, model: str | Path, num_layers: int, load_format: str = "auto"
) -> Counter[str]:
    """Linears by scheme: FLOAT, W8A8 (static), W8A8_DYNAMIC or FP8. A merged linear counts once.

    Raises QuantizationError for a quantized folder that is damaged.
    """
    if load_format == "auto" and is_quantized_folder(model):
        return count_linears(model)
    return Counter({scheme_at_load(profile): num_layers * len(LINEARS)})
