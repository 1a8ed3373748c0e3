"""Linears of 65 tokens and more in CUDA C++ for Hopper's matrix units, compiled at first use.

    linear.py (a tile's constants) -> compiler.py (NVRTC, kept on disk) -> driver.py (loads and launches)

`linear.cu` is the kernel. `lopa_cuda.tiles` says for which shapes it beats Triton's kernel and the library.
"""

from lopa_cuda.wgmma.linear import KIND_OF, launch_wide_linear, why_unavailable

__all__ = ["KIND_OF", "launch_wide_linear", "why_unavailable"]
