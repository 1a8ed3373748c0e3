"""One forward pass over this rank's tokens: laid out flat, padded to a captured shape, run, read back."""

from lopa_ascend.passes.forward import Forward, Graphs
from lopa_ascend.passes.graph_cache import folder_of
from lopa_ascend.passes.patience import Patience
from lopa_ascend.passes.shapes import Shapes
from lopa_ascend.passes.step import Reads, lay_out, pad
from lopa_ascend.passes.warmup import warm_up

__all__ = [
    "Forward",
    "Graphs",
    "Patience",
    "Reads",
    "Shapes",
    "folder_of",
    "lay_out",
    "pad",
    "warm_up",
]
