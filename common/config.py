"""YAML in, frozen checked objects out: the door through which every setting enters.

A device *profile* says what runs the model (engine, mesh, dtype, graphs, quantization, environment); a *run* says what
is decoded (model, decode settings, input, output). Nothing behind this module sees a dict or fills in a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator, model_validator

from common.config_errors import explain

Strategy = Literal["d2f", "fast_dllm", "vanilla"]
SamplingStrategy = Literal["default", "margin", "neg_entropy"]
WindowAttention = Literal["full", "block_causal"]
BranchScore = Literal["mean", "sliding_window", "random"]
SpawnRule = Literal["confident", "uncertain", "random"]
SpawnBlocks = Literal["all", "first"]

AUTO_LOOKAHEAD = -1  # num_lookahead: as many as pay on this device

_CONFIGS = Path(__file__).resolve().parents[1] / "configs"

_REFUSED_KEYS = {
    "branching_factor": "published scripts use it for both k and k+1; set decode.num_lookahead to k, the number of "
    "lookahead branches beside the anchor",
    "trust_remote_code": "code from a checkpoint folder is never run; remove the key",
}


class ConfigError(ValueError):
    """A setting is wrong; the message names the file, the key and the fix."""


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class DecodeConfig(Frozen):
    """How a request is decoded. Names are those of D2F and LoPA; the paper's symbols stand behind them."""

    strategy: Strategy = "d2f"
    num_lookahead: int = Field(default=3, ge=-1)  # k: branches beside the anchor; `auto` is -1
    block_size: int = Field(default=32, ge=1)
    max_new_tokens: int = Field(default=256, ge=1)  # the canvas holds the whole blocks that fit
    block_add_threshold: float = Field(default=0.1, ge=0, le=1)  # tau_add
    decoded_token_threshold: float = Field(default=0.95, gt=0, le=1)  # tau_act
    skip_threshold: float = Field(default=0.9, gt=0, le=1)  # tau_conf
    sampling_strategy: SamplingStrategy = "neg_entropy"
    branch_score: BranchScore = "mean"
    spawn_rule: SpawnRule = "confident"
    spawn_blocks: SpawnBlocks = "all"  # lookaheads from every active block, or from the first that holds masks
    bottom_share: float = Field(default=1.0, gt=0, le=1)
    creation_weight: float = Field(default=0.0, ge=0, le=1)
    window_attention: WindowAttention = "full"
    shift_row: Literal["stale", "fresh"] = "stale"
    cache: Literal["prefix", "dual"] = "prefix"
    reuse_prefix: bool = False  # keep the KV of a prompt's start from an earlier prompt with the same: approximate
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    stop_at_eos: bool = True
    stop: tuple[str, ...] = ()
    max_steps: int | None = Field(default=None, ge=1)
    eos_token_id: int | None = None  # None: the checkpoint's own
    mask_token_id: int | None = None  # None: the checkpoint's own

    @field_validator("num_lookahead", mode="before")
    @classmethod
    def _count_or_auto(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and value < 0:
            raise ValueError("set it to 0 or more, or to auto")
        return AUTO_LOOKAHEAD if value == "auto" else value

    @field_serializer("num_lookahead")
    def _auto_by_name(self, value: int) -> int | str:
        return "auto" if value == AUTO_LOOKAHEAD else value

    @field_validator("sampling_strategy", mode="before")
    @classmethod
    def _ranks_tokens(cls, value: Any) -> Any:
        if value in (None, "none", False):
            raise ValueError(
                "fills and lookahead branches are ranked by token confidence: set it to default, margin or neg_entropy"
            )
        return value

    @field_validator("stop")
    @classmethod
    def _stops_somewhere(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string stops before the first token: remove it")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> DecodeConfig:
        if self.strategy != "vanilla" and self.block_size > self.max_new_tokens:
            raise ValueError(
                f"block_size {self.block_size} is larger than max_new_tokens {self.max_new_tokens}: "
                "no block would fit; lower block_size or raise max_new_tokens"
            )
        if self.strategy != "d2f" and self.window_attention == "block_causal":
            raise ValueError(f"strategy {self.strategy} attends to its whole canvas: set window_attention to full")
        if self.strategy != "d2f" and self.reuse_prefix:
            raise ValueError(f"strategy {self.strategy} forwards the prompt again and again: remove reuse_prefix")
        if self.strategy != "fast_dllm" and self.cache == "dual":
            raise ValueError(f"cache dual is the one of strategy fast_dllm, not of {self.strategy}: change one of them")
        if self.branch_score != "mean" and self.bottom_share < 1:
            raise ValueError(f"bottom_share only acts with branch_score mean, not {self.branch_score}: remove it")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k is not None):
            raise ValueError("top_p and top_k only act with temperature > 0: set temperature or remove them")
        return self


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


class InputConfig(Frozen):
    """JSONL with one request a line: `id` (else the line number) and `prompt`, `messages` or `question`.

    prompt_template is applied to lines that have all the fields it names, e.g. "Q: {question}\\nA:". Without it a
    `question` becomes the one message of a chat, or plain text where the model has no chat template.
    """

    path: str
    limit: int | None = Field(default=None, ge=1)
    prompt_template: str | None = None
    add_bos_token: bool = False


class OutputConfig(Frozen):
    path: str = Field(min_length=1)
    metrics_path: str | None = None  # None: beside the output, `<stem>.metrics.json`


class RunConfig(Frozen):
    """What is decoded; `configs/runs/*.yaml`. Relative paths are relative to the working directory."""

    model: str
    lora_path: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    decode: DecodeConfig = DecodeConfig()
    max_num_requests: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)
    input: InputConfig | None = None
    output: OutputConfig | None = None


ConfigT = TypeVar("ConfigT", bound=Frozen)


def find_config(kind: Literal["profiles", "runs", "sweeps"], name: str | Path) -> Path:
    """A path as it is; the bare name of a file in configs/`kind` as its path. Raises ConfigError naming those there."""
    folder = _CONFIGS / kind
    candidates = (Path(name), folder / name, folder / f"{name}.yaml")
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) or "none"
        raise ConfigError(f"{name}: no such file, and not one of the {kind} in {folder} ({known})")
    return found


def load_profile_and_run(
    profile: str | Path, run: str | Path, overrides: Sequence[str] = ()
) -> tuple[DeviceProfile, RunConfig]:
    """Both files of a run. An override goes to the file that its first key belongs to. Raises ConfigError."""
    of_profile = [item for item in overrides if item.partition("=")[0].split(".")[0] in DeviceProfile.model_fields]
    of_run = [item for item in overrides if item not in of_profile]
    return load_profile(profile, of_profile), load_run(run, of_run)


def load_profile(path: str | Path, overrides: Sequence[str] = ()) -> DeviceProfile:
    """Read a device profile. Raises ConfigError naming file, key and fix."""
    return load_yaml(path, DeviceProfile, overrides)


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply `key=value` overrides (dotted keys, YAML values). Raises ConfigError."""
    return load_yaml(path, RunConfig, overrides)


def load_yaml(path: str | Path, kind: type[ConfigT], overrides: Sequence[str] = ()) -> ConfigT:
    """Any file of settings as its checked object. Raises ConfigError."""
    tree = _read_yaml(Path(path))
    for override in overrides:
        _apply_override(tree, override)
    _refuse_keys(tree, Path(path))
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, Path(path), kind)) from None


class _UniqueKeys(yaml.SafeLoader):
    """YAML whose second value for a key does not silently replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; configs/ holds examples")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: not valid YAML ({reason})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(tree).__name__}")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override}: write key=value, for example --set decode.num_lookahead=7")
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        raise ConfigError(f"--set {override}: the value is not valid YAML; quote it") from None
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {parent} is a single value, not a section")
        node = child
    node[leaf] = value


def _refuse_keys(tree: Mapping[str, Any], path: Path, prefix: str = "") -> None:
    for key, value in tree.items():
        if key in _REFUSED_KEYS:
            raise ConfigError(f"{path}: {prefix}{key}: {_REFUSED_KEYS[key]}")
        if isinstance(value, Mapping):
            _refuse_keys(value, path, f"{prefix}{key}.")
