"""Capture on CUDA. All graphs of a process share one memory pool: replays follow one another on one stream, so scratch
memory of one may be reused by the next; what must outlive a replay lies in buffers allocated outside."""

from __future__ import annotations

from types import SimpleNamespace
from weakref import WeakSet

import torch
from torch import Tensor

from graphs.runner import Replay


class CudaCapture:
    """graphs.runner.Capture by torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(self, work: Replay) -> Replay:
        torch.cuda.synchronize()
        if not self._graphs:  # a pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog thread may query its events meanwhile, which a global capture forbids.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        self._graphs.add(graph)
        return graph.replay

    def allocated_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free


def outliving_capture(made: Tensor) -> Tensor:
    """Return what a capture's work has made for whoever reads it after a replay, before the next one of any graph; the
    tensor itself where nothing is captured. The memory stays the graphs': they may use it again.

    To be called, and `made` to be held, until the work is at its end, so that nothing in this graph is written there.
    """
    if not (made.is_cuda and torch.cuda.is_current_stream_capturing()):
        return made
    words = made.view(torch.int16 if made.element_size() == 2 else torch.int32)  # NumPy has no bfloat16
    memory = SimpleNamespace(__cuda_array_interface__=words.__cuda_array_interface__)
    return torch.as_tensor(memory, device=made.device).view(made.dtype)
