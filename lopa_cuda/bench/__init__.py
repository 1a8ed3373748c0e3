"""What `lopa bench` measures of this engine alone: its host's part of a step, and its kernels, a module a section.

Importing the kernels' modules needs Triton; running them needs a CUDA device.
"""

from lopa_cuda.bench.host import Host

__all__ = ["Host"]
