"""`lopa quantize`: activation ranges from decoding, the 8-bit folder, and what it cost beside the float model."""

from common.quantization.quantize import QuantizeRequest, quantize_model

__all__ = [
    "QuantizeRequest",
    "quantize_model",
]
