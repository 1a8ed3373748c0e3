"""What runs the model: `configs/profiles/*.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from common.config.frozen import Frozen


class MeshConfig(Frozen):
    """Sizes of the device mesh (dp, bp, tp); their product is the number of processes."""

    data_parallel_size: int = Field(default=1, ge=1)
    branch_parallel_size: int = Field(default=1, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)

    @property
    def num_processes(self) -> int:
        return self.data_parallel_size * self.branch_parallel_size * self.tensor_parallel_size


class GraphConfig(Frozen):
    """Whether steps are captured and replayed, and for which padded shapes.

    Ascend: npugraph captures, npugraph_ex compiles before it does, torchair lowers a step to GE graphs.
    """

    mode: Literal["eager", "cuda_graph", "npugraph", "npugraph_ex", "torchair"] = "eager"
    window_buckets: tuple[int, ...] = ()  # empty: chosen by graphs.buckets
    row_buckets: tuple[int, ...] = ()
    cache_dir: str | None = None  # compiled graphs are kept here across starts


class DeviceProfile(Frozen):
    """The hardware side of a run; `configs/profiles/*.yaml`."""

    name: str
    engine: Literal["lopa_cuda", "lopa_ascend", "auto"]
    device: Literal["cpu", "cuda", "npu"]
    mesh: MeshConfig | Literal["auto"] = MeshConfig()
    processes_per_node: int | None = Field(default=None, ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    kv_cache_dtype: Literal["auto"] = "auto"
    graph: GraphConfig = GraphConfig()
    enforce_eager: bool = False
    quantization: Literal["w8a8", "fp8"] | None = None
    kernels: Literal["torch", "triton", "npu", "auto"] = "auto"
    weight_prefetch_mb: int = Field(default=0, ge=0)  # of the next linear's weight, into L2 under an all-reduce over tp
    max_model_len: int = Field(default=4096, ge=1)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    collective_timeout_s: float = Field(default=60.0, gt=0)
    environment: dict[str, str] = Field(default_factory=dict)

    @field_validator("environment", mode="before")
    @classmethod
    def _strings(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: str(item).lower() if isinstance(item, bool) else str(item) for key, item in value.items()}

    @model_validator(mode="after")
    def _consistent(self) -> DeviceProfile:
        if self.engine == "lopa_cuda" and self.device == "npu":
            raise ValueError("engine lopa_cuda does not run on npu: set engine to lopa_ascend")
        if self.engine == "lopa_ascend" and self.device == "cuda":
            raise ValueError("engine lopa_ascend does not run on cuda: set engine to lopa_cuda")
        if self.weight_prefetch_mb and self.device != "npu":
            raise ValueError(f"weight_prefetch_mb acts on npu only, and device is {self.device}: remove it")
        graph_device = {"cuda_graph": "cuda", "npugraph": "npu", "npugraph_ex": "npu", "torchair": "npu"}
        needed = graph_device.get(self.graph.mode)
        if needed is not None and needed != self.device and not self.enforce_eager:
            raise ValueError(f"graph.mode {self.graph.mode} needs device {needed}: set graph.mode to eager")
        if self.mesh != "auto" and self.mesh.num_processes % (self.processes_per_node or 1):
            raise ValueError(
                f"the mesh has {self.mesh.num_processes} processes, which do not fill nodes of processes_per_node "
                f"{self.processes_per_node}: change one of them"
            )
        return self
