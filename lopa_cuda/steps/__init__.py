"""One step's memory: the buffers that the host fills, the KV cache, and the commit of the winner's KV."""

from lopa_cuda.steps.commit import Committer, StagedPart
from lopa_cuda.steps.kv_cache import StaticKVCache
from lopa_cuda.steps.step import DeviceStep, ReadBuffers, Reads, ReadsKey, RowBuffers, RowsKey

__all__ = [
    "Committer",
    "DeviceStep",
    "ReadBuffers",
    "Reads",
    "ReadsKey",
    "RowBuffers",
    "RowsKey",
    "StagedPart",
    "StaticKVCache",
]
