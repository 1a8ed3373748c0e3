"""One step's memory: the buffers that the host fills, the KV cache, and the commit of the winner's KV."""

from lopa_cuda.steps.commit import Committer, Staged
from lopa_cuda.steps.handover import Handover
from lopa_cuda.steps.kv_cache import PAGE_SIZE, CacheSizes, PagedKVCache
from lopa_cuda.steps.share import Share, deal
from lopa_cuda.steps.slices import StagedSlice, cut, slice_length, slice_sizes, slices_pay
from lopa_cuda.steps.step import DeviceStep, LayersKey, ReadBuffers, Run, StepBuffers, in_whole_blocks, runs_of
from lopa_cuda.steps.tiles import RECORD, Tiling, write_tiles

__all__ = [
    "PAGE_SIZE",
    "RECORD",
    "CacheSizes",
    "Committer",
    "DeviceStep",
    "Handover",
    "LayersKey",
    "PagedKVCache",
    "ReadBuffers",
    "Run",
    "Share",
    "Staged",
    "StagedSlice",
    "StepBuffers",
    "Tiling",
    "cut",
    "deal",
    "in_whole_blocks",
    "runs_of",
    "slice_length",
    "slice_sizes",
    "slices_pay",
    "write_tiles",
]
