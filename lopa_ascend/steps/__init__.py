"""One step's memory: this rank's rows laid out flat and padded to a captured shape, and the halves that run on it."""

from lopa_ascend.steps.agreement import agreements
from lopa_ascend.steps.graph_cache import folder_of
from lopa_ascend.steps.layout import FlatStep, filler, lay_out, most_reads, pad, read_entries
from lopa_ascend.steps.patience import Patience
from lopa_ascend.steps.step import LayersKey, ReadBuffers, Sizes, StepBuffers

__all__ = [
    "FlatStep",
    "LayersKey",
    "Patience",
    "ReadBuffers",
    "Sizes",
    "StepBuffers",
    "agreements",
    "filler",
    "folder_of",
    "lay_out",
    "most_reads",
    "pad",
    "read_entries",
]
