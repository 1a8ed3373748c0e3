"""Triton-Ascend kernels. Importing this room needs Triton; lopa_ascend.ops.fused_kv does so when asked to."""

from lopa_ascend.kernels.rotate_and_write import rotate_and_write

__all__ = ["rotate_and_write"]
