"""Ranges of activations, observed while a float model decodes, from which static scales and smoothing are computed."""

from quant.calibration.calibrate import ActivationRange, Calibration, calibrate
from quant.calibration.smooth import smooth_layer

__all__ = ["ActivationRange", "Calibration", "calibrate", "smooth_layer"]
