"""What `lopa tune` does: tiles of a model's linears, measured on this device.

    model_linears -> candidates -> compile_all -> LinearPair.us, in captured graphs -> choose -> the user's file

`candidates`, `search` and `run` need no Triton; `stopwatch`, `pair` and `compiling` do, and are imported by name.
"""

from lopa_cuda.tuning.run import tune_model

__all__ = ["tune_model"]
