"""Quantized folders in msmodelslim's layout, read and written; every name is checked before a tensor is read."""

from quant.folder.checkpoint import float_tensors, load_quantized, schemes_of
from quant.folder.description import FLOAT, Scheme, write_description
from quant.folder.tensors import ShardWriter, TensorFolder, read_json

__all__ = [
    "FLOAT",
    "Scheme",
    "ShardWriter",
    "TensorFolder",
    "float_tensors",
    "load_quantized",
    "read_json",
    "schemes_of",
    "write_description",
]
