"""8-bit weights and activations, applied to a plain model from outside.

`w8a8` and `fp8` state the arithmetic once; `linear` swaps it into a model; `calibrate`, `smooth` and `quantize` make a
quantized folder from a float one; `checkpoint` reads such folders, ours and msmodelslim's.
"""

from quant.errors import QuantizationError

__all__ = ["QuantizationError"]
