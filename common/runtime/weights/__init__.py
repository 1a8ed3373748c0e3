"""The model in a device's memory: loaded, quantized, laid out; replaced, given back and taken again while it runs."""

from common.runtime.weights.holdings import Holdings
from common.runtime.weights.load import ModelLoader
from common.runtime.weights.schemes import linear_schemes, scheme_at_load

__all__ = ["Holdings", "ModelLoader", "linear_schemes", "scheme_at_load"]
