"""What a step is made of, for the estimate: kernels, collectives, and the host's own work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PARTS = (
    "host", "lengths", "embed", "norms", "qkv", "attention", "o", "all-reduce", "gate_up", "down", "experts", "head",
    "gather", "commit",
)  # fmt: skip

LAYER_PARTS = ("norms", "qkv", "attention", "o", "all-reduce", "gate_up", "down", "experts")


@dataclass(frozen=True, slots=True)
class Kernel:
    """Bytes are of device memory. weight_bytes: the part of `read` that is known before the step. num_pieces: parts
    that can run at once; None fills the device. times: in a step, on average."""

    part: str
    name: str
    kind: Literal["linear", "attention", "other"]
    read: float
    written: float
    flops: float = 0.0
    dtype: str = "bfloat16"
    weight_bytes: float = 0.0
    num_pieces: int | None = None
    times: float = 1.0


@dataclass(frozen=True, slots=True)
class Collective:
    """size: bytes on each rank before it. num_ranks: that take part. span: adjacent devices that they spread over.
    is_on_ai_cpu: HCCL runs it there instead of on the vector cores."""

    part: str
    name: Literal["all_reduce", "all_gather", "broadcast"]
    size: float
    num_ranks: int
    span: int
    times: float = 1.0
    is_on_ai_cpu: bool = False


@dataclass(frozen=True, slots=True)
class HostWork:
    part: str = "host"


Operation = Kernel | Collective | HostWork
