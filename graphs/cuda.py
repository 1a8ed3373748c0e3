"""Capture on CUDA. All graphs of a process share one memory pool: replays follow one another on one stream, so scratch
memory of one may be reused by the next; what must outlive a replay lies in buffers allocated outside."""

from __future__ import annotations

from weakref import WeakSet

import torch

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
