"""Checkpoint folder in, this rank's parameters out: every tensor the model holds, under our names, already sliced.

`RULES` is the one place that knows both vocabularies: ours (q, k, v and gate, up merged along rows) and Hugging Face's.
A `TensorSource` is what tensors are read from: a safetensors folder, made-up numbers, or another source with something
laid over it (LoRA in `common.lora`, quantized checkpoints in `quant`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open

from common.config import ConfigError
from common.models.config import ModelConfig, read_json_object

logger = logging.getLogger(__name__)

Slices = tuple[slice, ...]

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor. `shape` holds one letter a dimension (see `dimension_sizes`)."""

    name: str
    shape: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter: its pieces' slices of dimension `split` (None: replicated), stacked along dimension 0."""

    name: str
    split: int | None
    pieces: tuple[Piece, ...]

    def of_layer(self, layer: int) -> Rule:
        pieces = tuple(Piece(piece.name.format(i=layer), piece.shape) for piece in self.pieces)
        return Rule(self.name.format(i=layer), self.split, pieces)


def _rule(name: str, split: int | None, shapes: str, *sources: str) -> Rule:
    return Rule(name, split, tuple(Piece(*piece) for piece in zip(sources, shapes.split(), strict=True)))


_LAYER = "model.layers.{i}."
_ATTENTION, _MLP = _LAYER + "self_attn.", _LAYER + "mlp."
_Q, _K, _V, _O = (_ATTENTION + name for name in ("q_proj", "k_proj", "v_proj", "o_proj"))

RULES = (
    _rule("embed_tokens.weight", None, "VD", "model.embed_tokens.weight"),
    _rule("layers.{i}.input_norm.weight", None, "D", _LAYER + "input_layernorm.weight"),
    _rule("layers.{i}.qkv_proj.weight", 0, "QD KD KD", _Q + ".weight", _K + ".weight", _V + ".weight"),
    _rule("layers.{i}.qkv_proj.bias", 0, "Q K K", _Q + ".bias", _K + ".bias", _V + ".bias"),
    _rule("layers.{i}.o_proj.weight", 1, "DQ", _O + ".weight"),
    _rule("layers.{i}.post_attention_norm.weight", None, "D", _LAYER + "post_attention_layernorm.weight"),
    _rule("layers.{i}.gate_up_proj.weight", 0, "ID ID", _MLP + "gate_proj.weight", _MLP + "up_proj.weight"),
    _rule("layers.{i}.down_proj.weight", 1, "DI", _MLP + "down_proj.weight"),
    _rule("norm.weight", None, "D", "model.norm.weight"),
    _rule("lm_head.weight", 0, "VD", "lm_head.weight"),
)
_TIED_HEAD = _rule("lm_head.weight", 0, "VD", "model.embed_tokens.weight")


def rules_of(config: ModelConfig) -> list[Rule]:
    """One rule for every parameter of the model."""
    rules: list[Rule] = []
    for rule in RULES:
        if "{i}" in rule.name:
            rules += [rule.of_layer(layer) for layer in range(config.num_layers)]
        else:
            rules.append(_TIED_HEAD if config.tie_word_embeddings and rule.name == _TIED_HEAD.name else rule)
    return rules


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model reads, by its checkpoint name."""
    sizes = dimension_sizes(config)
    pieces = [piece for rule in rules_of(config) for piece in rule.pieces]
    return {piece.name: tuple(sizes[letter] for letter in piece.shape) for piece in pieces}


def dimension_sizes(config: ModelConfig) -> dict[str, int]:
    """What the letters of a shape stand for: V vocabulary, D width, I intermediate, Q query, K key or value width."""
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "I": config.intermediate_size,
        "Q": config.num_heads * config.head_size,
        "K": config.num_kv_heads * config.head_size,
    }


def shard_bounds(size: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """[start, stop) of one rank's share: ceil(size / tp_size) each, the last ones smaller where it does not divide."""
    assert 0 <= tp_rank < tp_size, "tp_rank counts from 0 to tp_size - 1"
    share = -(-size // tp_size)
    return min(size, tp_rank * share), min(size, (tp_rank + 1) * share)


def check_tensor_parallel(config: ModelConfig, tp_size: int) -> None:
    """Heads, KV heads and the MLP must divide evenly over the tp axis. Raises ConfigError with the sizes that do."""
    split = {"heads": config.num_heads, "KV heads": config.num_kv_heads, "intermediate_size": config.intermediate_size}
    uneven = [f"{size} {name}" for name, size in split.items() if size % tp_size]
    if uneven:
        valid = [n for n in range(1, config.num_kv_heads + 1) if not any(size % n for size in split.values())]
        raise ConfigError(
            f"tensor_parallel_size {tp_size} does not divide {' and '.join(uneven)}: "
            f"set it to {' or '.join(map(str, valid))}"
        )


class TensorSource(Protocol):
    """Named tensors that can be read in part."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, slices: Slices = ()) -> torch.Tensor:
        """The tensor, or the part that `slices` (one a dimension) cut out; may alias the file. Raises ConfigError."""

    def where(self, name: str) -> str:
        """The file that holds or should hold the tensor, for error messages."""


class SafetensorsFolder:
    """Tensors of `<stem>.safetensors`, or of the shards that `<stem>.safetensors.index.json` lists."""

    def __init__(self, folder: str | Path, stem: str = "model") -> None:
        self._folder = Path(folder)
        self._index = self._folder / f"{stem}.safetensors.index.json"
        self._single = self._folder / f"{stem}.safetensors"
        self._open_files: dict[Path, Any] = {}
        self._file_of = self._read_index() if self._index.is_file() else self._read_single()

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice_of(name).get_shape())

    def read(self, name: str, slices: Slices = ()) -> torch.Tensor:
        part = self._slice_of(name)
        try:
            tensor: torch.Tensor = part[slices or (slice(None),) * len(part.get_shape())]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ConfigError(
                f"{self.where(name)}: {name}: cannot be read ({error}); download the file again"
            ) from None
        return tensor

    def where(self, name: str) -> str:
        fallback = self._index if self._index.is_file() else self._single
        return str(self._file_of.get(name, fallback))

    def _slice_of(self, name: str) -> Any:
        assert name in self._file_of, f"{name} is not among names()"
        try:
            return self._open(self._file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise ConfigError(f"{self.where(name)}: {name}: not in this file ({error}); download it again") from None

    def _read_index(self) -> dict[str, Path]:
        weight_map = read_json_object(self._index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{self._index}: weight_map: missing; download the file again")
        file_of = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ConfigError(f"{self._index}: {name}: {file!r} is not a file of this folder; download it again")
            file_of[name] = self._folder / file
            if not file_of[name].is_file():
                raise ConfigError(f"{file_of[name]}: missing, but {self._index.name} puts {name} there; download it")
        return file_of

    def _read_single(self) -> dict[str, Path]:
        if not self._single.is_file():
            raise ConfigError(
                f"{self._folder}: neither {self._single.name} nor {self._index.name} found; download the checkpoint "
                "in safetensors format (.bin files are not read)"
            )
        return dict.fromkeys(self._open(self._single).keys(), self._single)

    def _open(self, path: Path) -> Any:
        if path not in self._open_files:
            try:
                self._open_files[path] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError, ValueError) as error:
                raise ConfigError(f"{path}: {_why_unreadable(path, error)}") from None
        return self._open_files[path]


def _why_unreadable(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        if file.read(23) == b"version https://git-lfs":
            return "a git-lfs pointer, not the weights; run `git lfs pull` in the folder"
    return f"truncated or corrupt ({error}); download the file again"


class DummySource:
    """Made-up weights of the right shapes: norms 1, the rest normal with deviation 0.02, the same for every tp size.

    Every tensor is a stretch of one repeated pool of random numbers, so that 7B parameters cost a copy, not 7B draws.
    The pool's length is a prime, so no two rows of a matrix are equal.
    """

    _POOL_SIZE = 4_194_301
    _STD = 0.02

    def __init__(self, config: ModelConfig, dtype: torch.dtype, seed: int, device: torch.device | str = "cpu") -> None:
        self._shapes = checkpoint_shapes(config)
        pool = torch.randn(self._POOL_SIZE, generator=torch.Generator().manual_seed(seed)) * self._STD
        self._pool = pool.to(device, dtype)

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def where(self, name: str) -> str:
        return "load_format dummy"

    def read(self, name: str, slices: Slices = ()) -> torch.Tensor:
        shape = self._shapes[name]
        if "norm" in name:
            return torch.ones(shape, dtype=self._pool.dtype, device=self._pool.device)[slices]
        rows, *columns = slices or (slice(0, shape[0]),)
        first_row, last_row, _ = rows.indices(shape[0])
        row_size = shape[1] if len(shape) == 2 else 1
        stretch = self._stretch(crc32(name.encode()) + first_row * row_size, (last_row - first_row) * row_size)
        whole_rows = stretch.view(last_row - first_row, *shape[1:])
        return whole_rows[:, columns[0]] if columns else whole_rows

    def _stretch(self, start: int, count: int) -> torch.Tensor:
        stretch = torch.empty(count, dtype=self._pool.dtype, device=self._pool.device)
        filled, start = 0, start % self._POOL_SIZE
        while filled < count:
            step = min(count - filled, self._POOL_SIZE - start)
            stretch[filled : filled + step] = self._pool[start : start + step]
            filled, start = filled + step, 0
        return stretch


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    *,
    tp_rank: int,
    tp_size: int,
    dtype: torch.dtype,
    lora_path: str | None = None,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    device: torch.device | str = "cpu",
    source: TensorSource | None = None,
    without: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """This rank's parameters by our names (see RULES); dummy weights read no file of `folder`.

    source: where tensors come from instead. without: parameters, by our names, that come from elsewhere.
    Raises ConfigError naming file, tensor and fix.
    """
    check_tensor_parallel(config, tp_size)
    if source is None:
        source = DummySource(config, dtype, seed, device) if load_format == "dummy" else SafetensorsFolder(folder)
    if tp_rank == 0:
        _warn_of_unused(source, config)
    if lora_path is not None:
        from common.lora import LoraSource  # here because common.lora stands on this module

        source = LoraSource(source, lora_path, config)
    shapes = checkpoint_shapes(config)
    weights = {}
    for rule in rules_of(config):
        if rule.name in without:
            continue
        parts = [
            _read_share(source, piece.name, shapes[piece.name], rule.split, tp_rank, tp_size) for piece in rule.pieces
        ]
        weights[rule.name] = _stacked(parts, dtype, device)
    return weights


def _read_share(
    source: TensorSource, name: str, shape: tuple[int, ...], split: int | None, tp_rank: int, tp_size: int
) -> torch.Tensor:
    _check_tensor(source, name, shape)
    slices = [slice(0, size) for size in shape]
    if split is not None:
        slices[split] = slice(*shard_bounds(shape[split], tp_rank, tp_size))
    share = source.read(name, tuple(slices))
    if share.dtype not in _FLOAT_DTYPES:
        raise ConfigError(
            f"{source.where(name)}: {name}: holds {share.dtype}, not plain weights; set quantization in the profile "
            "or use the unquantized checkpoint"
        )
    return share


def _stacked(parts: list[torch.Tensor], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    # Copied even where nothing changes: a part read from a file may still be backed by it.
    stacked = torch.empty((sum(len(part) for part in parts), *parts[0].shape[1:]), dtype=dtype, device=device)
    row = 0
    for part in parts:
        stacked[row : row + len(part)].copy_(part)
        row += len(part)
    return stacked


def _check_tensor(source: TensorSource, name: str, shape: tuple[int, ...]) -> None:
    where = source.where(name)
    if name not in source.names():
        raise ConfigError(f"{where}: {name}: missing; the checkpoint is incomplete or of another family")
    found = source.shape(name)
    if found != shape:
        raise ConfigError(
            f"{where}: {name}: shape {list(found)}, but config.json says {list(shape)}; use files that match"
        )


def _warn_of_unused(source: TensorSource, config: ModelConfig) -> None:
    unused = sorted(set(source.names()) - checkpoint_shapes(config).keys())
    if unused:
        logger.warning("%d tensors of the checkpoint are not used: %s", len(unused), ", ".join(unused))
