"""The decoder's stages: in plain PyTorch (`plain`), the specification, and in fused kernels (`fused`).

`fused` needs Triton and is imported by name.
"""

from lopa_cuda.ops.plain import TorchOps

__all__ = ["TorchOps"]
