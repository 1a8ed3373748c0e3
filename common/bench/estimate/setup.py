"""What decides how long a step takes besides the hardware: the model, its share on a rank, the rows, the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from common.checkpoint import ModelConfig
from graphs.hccl import most_aiv_bytes

GROUPED_SWIGLU_COLUMNS = 10240  # of npu_grouped_matmul_swiglu_quant_v2, at most, by its documentation


@dataclass(frozen=True, slots=True)
class Launches:
    """Which kernels a decoder layer's stages become.

    fuses_*: the stage in front writes the quantized input, or the gate's linear applies the activation. A stage that
    does not fuse it costs a kernel and a trip through memory. splits_keys: attention spreads a row's keys over all
    units and merges the parts. finishes_reads_only: the last layer takes after its attention the tokens that are read,
    not all. commit_copies: a committed block is copied to the end of the cache. statistics_bytes: moved for
    each logit to reduce it to token, probability and confidence. quantized_swiglu_columns: as fuses_swiglu, of int8
    products alone whose gate and up have at most so many columns on a rank. chooses_fusions: a start takes kernels that
    stand for several where they are faster.
    """

    name: str
    merges_qkv: bool = True
    fuses_norm_quant: bool = True
    fuses_attention_quant: bool = True
    fuses_swiglu: bool = True
    quantized_swiglu_columns: int = 0
    gate_up_bytes: int = 2  # of a value between gate_up and a separate activation, quantized
    rotary_kernels: int = 1
    kv_write_kernels: int = 0
    splits_keys: bool = True
    finishes_reads_only: bool = True
    commit_copies: bool = True
    statistics_kernels: int = 3
    statistics_bytes: int = 2
    is_block_causal_only: bool = False
    chooses_fusions: bool = False

    def rotating(self, *, in_one_kernel: bool) -> Launches:
        """The same with split, rotation and KV write in one kernel or, on Ascend, in five."""
        rotary_kernels, kv_write_kernels = (1, 0) if in_one_kernel else (4, 1)
        return replace(self, rotary_kernels=rotary_kernels, kv_write_kernels=kv_write_kernels)

    def activating(self, *, in_one_kernel: bool) -> Launches:
        """The same with Ascend's int8 product of gate and up activating and quantizing where it fits, or not."""
        return replace(self, quantized_swiglu_columns=GROUPED_SWIGLU_COLUMNS if in_one_kernel else 0)


# As the engines are: lopa_cuda.ops.fused; lopa_ascend.stages over lopa_ascend.ops.facade with what a start takes if it
# finds it right and faster (lopa_ascend.selftest.fuse), and the head's statistics as common.model.sampling's plain
# operators. Apart, query, key and value are copied out of qkv before they are rotated.
LAUNCHES = {
    "lopa_cuda": Launches("fused CUDA kernels"),
    "lopa_ascend": Launches(
        "torch_npu operators", fuses_attention_quant=False, fuses_swiglu=False,
        quantized_swiglu_columns=GROUPED_SWIGLU_COLUMNS, gate_up_bytes=4, splits_keys=False,
        finishes_reads_only=False, commit_copies=False, statistics_kernels=23, statistics_bytes=46,
        is_block_causal_only=True, chooses_fusions=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setup:
    """One step of one replica.

    linear_dtype: of the decoder layers' linears, and of the head where `quantizes_head`; else it and everything else
    have `dtype`. num_rows: of all requests of the replica. prefix: cached positions in front of the window.
    read_share: of the window's positions that go through the head. tokens_per_step: of a request; a block is committed
    every block_size of them. hccl: the variables by which HCCL chooses; None where another library sums.
    """

    model: ModelConfig
    launches: Launches
    dtype: str
    linear_dtype: str
    tp: int
    bp: int
    num_rows: int
    num_requests: int
    window: int
    prefix: int
    block_size: int
    read_share: float
    tokens_per_step: float
    is_block_causal: bool
    quantizes_head: bool = False
    is_captured: bool = True
    hides_all_reduce: bool = False  # the next linear's weight is prefetched into L2 under the all-reduce
    prefetch_bytes: float = float("inf")  # at most, beside what fits into L2 and into the time
    length_updates: Literal["after", "before"] | None = None  # when a replay's new attention lengths are written
    length_events: Literal["after", "before"] | None = None  # when a replay is told that they are as they were
    hccl: Mapping[str, str] | None = None
    cuts_all_reduces: bool = False  # into pieces that HCCL runs on vector cores
    hides_host: bool = False  # the host lays out a step while the one before it runs

    @property
    def is_quantized(self) -> bool:
        return self.linear_dtype != self.dtype

    def quantizes(self, part: str) -> bool:
        """Whether a linear of this part of a step is in 8 bits."""
        return self.is_quantized and (part != "head" or self.quantizes_head)

    def fuses_swiglu(self, num_columns: int) -> bool:
        """Whether the product of so many columns, gate and up of a rank, applies the activation itself."""
        columns = self.launches.quantized_swiglu_columns if self.linear_dtype == "int8" else 0
        return self.launches.fuses_swiglu or num_columns <= columns

    @property
    def rows(self) -> int:
        """Rows of this rank."""
        return -(-self.num_rows // self.bp)

    @property
    def length_changes(self) -> float:
        """Share of the steps in which a block of some request opens or commits."""
        return min(1.0, 2 * self.num_requests * self.tokens_per_step / self.block_size)

    @property
    def num_tokens(self) -> int:
        return self.rows * self.window

    @property
    def all_reduce_bytes(self) -> int:
        """Bytes on each rank of one of a layer's two."""
        return self.num_tokens * self.model.hidden_size * (4 if self.dtype == "float32" else 2)

    @property
    def most_aiv_bytes(self) -> int | None:
        """Bytes of the largest all-reduce that HCCL runs on vector cores; None where another library sums."""
        return None if self.hccl is None else most_aiv_bytes(self.tp, self.hccl)

    @property
    def all_reduce_pieces(self) -> int:
        """Collectives that one of a layer's two becomes."""
        return -(-self.all_reduce_bytes // self.most_aiv_bytes) if self.cuts_all_reduces and self.most_aiv_bytes else 1

    @property
    def num_reads(self) -> int:
        return self.rows * max(1, round(self.window * self.read_share))

    @property
    def keys_seen(self) -> float:
        """Keys that a query sees, on average. Under block-causal attention it sees to the end of its block."""
        if not self.is_block_causal:
            return self.prefix + self.window
        return self.prefix + (self.window + min(self.block_size, self.window)) / 2
