"""What runs the model: `configs/profiles/*.yaml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from common.config.frozen import Count, Settings, refusing_old
from common.config.old_spellings import why_old_of_profile


class MeshConfig(Settings):
    """Sizes of the device mesh (dp, bp, tp); their product is the number of processes."""

    data_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Replicas: copies of the engine, which take the next request when they have room (dp).",
    )
    branch_parallel_size: int = Field(
        default=1, ge=1, description="Processes over which the branches of a step are dealt (bp)."
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Processes over which every layer's heads and widths are cut (tp)."
    )

    @property
    def num_processes(self) -> int:
        return self.data_parallel_size * self.branch_parallel_size * self.tensor_parallel_size


class GraphConfig(Settings):
    """Whether steps are captured and replayed, and for which padded shapes.

    Ascend: npugraph captures, npugraph_ex compiles before it does, torchair lowers a step to GE graphs.
    """

    _has_today_s_keys = refusing_old(why_old_of_profile)

    mode: Literal["eager", "cuda_graph", "npugraph", "npugraph_ex", "torchair"] = Field(
        default="eager",
        description="How steps run: as they are (`eager`), or captured and replayed, by `cuda_graph` on a GPU, by "
        "another on an NPU.",
    )
    token_buckets: tuple[Count, ...] = Field(
        default=(),
        description="Numbers of tokens that steps are padded to and captured at; if empty, the engine chooses.",
    )


class NpuConfig(Settings):
    """What only device npu knows; most of it waits for the first measurements there (docs/ascend.md)."""

    selftest: Literal["strict", "warn", "off"] = Field(
        default="strict",
        description="What a start does about a wrong operation: refuse (`strict`), warn and go on (`warn`), or not "
        "look (`off`).",
    )
    attention: Literal["auto", "v1", "v2"] = Field(
        default="v1", description="The version of the attention operator; `auto` takes the fastest that is right."
    )
    kv_view: Literal["3d", "4d"] = Field(
        default="3d",
        description="The pages as attention sees them; `4d` needs one KV head a process; `attention: auto` chooses "
        "by itself.",
    )
    weight_prefetch_mb: int = Field(
        default=0, ge=0, description="MiB of the next linear's weight pulled into L2 under an all-reduce over tp."
    )
    cores: Literal["all", "slice"] = Field(
        default="all",
        description="Processor cores of a process: all that it was given, or its equal slice among the node's "
        "processes, whose first core goes to the thread that waits for the device.",
    )
    start_timeout_s: float = Field(
        default=900.0, gt=0, le=1e6, description="Seconds that processes wait for one that loads, compiles or captures."
    )
    row_buckets: tuple[Count, ...] = Field(
        default=(), description="Numbers of virtual rows that steps are padded to; if empty, the engine chooses."
    )
    max_graphs: int = Field(
        default=48,
        ge=3,
        description="The most captured shapes, a third of them of the head; other steps run uncaptured.",
    )
    length_updates: Literal["after", "before"] = Field(
        default="after",
        description="`npugraph` and `npugraph_ex`: write new attention lengths while the replay runs (`after`), or "
        "`before` it, which virtual NPUs need.",
    )
    cache_dir: str | None = Field(
        default=None, description="Folder in which `npugraph_ex` and `torchair` keep compiled graphs between starts."
    )


def _as_variable(item: Any) -> Any:
    """The text of a text, number or boolean; anything else as it is, to be refused."""
    if isinstance(item, bool):
        return str(item).lower()
    return str(item) if isinstance(item, (int, float)) else item


class DeviceProfile(Settings):
    """The hardware side of a run; `configs/profiles/*.yaml`."""

    _has_today_s_keys = refusing_old(why_old_of_profile)

    name: str = Field(min_length=1, description="This profile's name in logs, errors and result files.")
    engine: Literal["lopa_cuda", "lopa_ascend", "auto"] = Field(
        description="`lopa_cuda` for GPUs and CPUs, `lopa_ascend` for NPUs and CPUs, `auto` for the first that has "
        "the device."
    )
    device: Literal["cpu", "cuda", "npu"] = Field(description="The kind of device.")
    mesh: MeshConfig | Literal["auto"] = Field(
        default=MeshConfig(),
        description="How the processes share the work; `auto` takes every visible device and the fastest split.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16", description="Precision of weights, activations and KV, where they are not quantized."
    )
    graph: GraphConfig = Field(default=GraphConfig(), description="Whether and how steps are captured.")
    npu: NpuConfig = Field(default=NpuConfig(), description="What only an NPU knows.")
    quantization: Literal["w8a8", "fp8"] | None = Field(
        default=None,
        description="Linears and experts in 8 bits: `w8a8` from a quantized folder or made at load, "
        "`fp8` made at load (`lopa_cuda`).",
    )
    quantize_lm_head: bool = Field(
        default=False,
        description="With `quantization`: the head in 8 bits too, for half its bytes and slightly other probabilities.",
    )
    kernels: Literal["torch", "triton", "npu", "auto"] = Field(
        default="auto",
        description="Operators of the layers: plain PyTorch (`torch`), fused kernels (`triton`; on an NPU "
        "Triton-Ascend's), those of `lopa_ascend` (`npu`), or the fastest that device and dtype allow (`auto`).",
    )
    batch_invariant: bool = Field(
        default=False,
        description="Device cuda, bfloat16, tp 1: a request's tokens do not depend on the others of a pass; slower.",
    )
    max_model_len: int = Field(
        default=4096,
        ge=1,
        description="The most positions of a request, prompt and canvas together; the model's own limit holds too.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="The most memory taken: by the KV cache, of what the weights leave free (`lopa_cuda`), or by "
        "everything, of the whole device (`lopa_ascend`).",
    )
    collective_timeout_s: float = Field(
        default=60.0, gt=0, le=1e6, description="Seconds after which a process stops waiting for the others."
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="Variables that every process gets, unless already set."
    )

    @field_validator("environment", mode="before")
    @classmethod
    def _strings(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: _as_variable(item) for key, item in value.items()}

    @field_validator("environment")
    @classmethod
    def _can_be_exported(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not name or "=" in name or re.search(r"[\0\ud800-\udfff]", name + text):
                raise ValueError(f"{name!r} cannot be a variable: write it as NAME: value")
            if name.endswith("_NUM_THREADS") and not (text.isdecimal() and int(text) > 0):
                raise ValueError(f"{name} is {text!r}: set it to a number of threads, 1 or more")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> DeviceProfile:
        if self.engine == "lopa_cuda" and self.device == "npu":
            raise ValueError("engine lopa_cuda does not run on npu: set engine to lopa_ascend")
        if self.engine == "lopa_ascend" and self.device == "cuda":
            raise ValueError("engine lopa_ascend does not run on cuda: set engine to lopa_cuda")
        if self.quantize_lm_head and self.quantization is None:
            raise ValueError("quantize_lm_head needs quantization: set it to w8a8 or fp8, or remove quantize_lm_head")
        if self.npu.weight_prefetch_mb and self.device != "npu":
            raise ValueError(f"npu.weight_prefetch_mb acts on npu only, and device is {self.device}: remove it")
        if self.npu != NpuConfig() and self.device != "npu" and self.engine != "lopa_ascend":
            raise ValueError(f"npu has settings of engine lopa_ascend, and device is {self.device}: remove them")
        if self.batch_invariant and not self._can_be_invariant():
            raise ValueError(
                "batch_invariant needs engine lopa_cuda or auto, device cuda, dtype bfloat16 without quantization, "
                "kernels auto or triton, and tensor_parallel_size 1: change these or remove it"
            )
        graph_device = {"cuda_graph": "cuda", "npugraph": "npu", "npugraph_ex": "npu", "torchair": "npu"}
        needed = graph_device.get(self.graph.mode)
        if needed is not None and needed != self.device:
            raise ValueError(f"graph.mode {self.graph.mode} needs device {needed}: set graph.mode to eager")
        return self

    def _can_be_invariant(self) -> bool:
        has_kernels = self.device == "cuda" and self.dtype == "bfloat16" and self.kernels in ("auto", "triton")
        is_whole = self.mesh != "auto" and self.mesh.tensor_parallel_size == 1
        return has_kernels and is_whole and self.quantization is None
