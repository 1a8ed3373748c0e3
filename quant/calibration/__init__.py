"""What static scales and smoothing rest on: the ranges of activations, observed while a float model decodes."""

from quant.calibration.calibrate import ActivationRange, Calibration, calibrate
from quant.calibration.smooth import smooth_layer

__all__ = [
    "ActivationRange",
    "Calibration",
    "calibrate",
    "smooth_layer",
]
