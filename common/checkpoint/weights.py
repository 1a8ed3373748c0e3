"""Checkpoint folder in, this rank's parameters out: every tensor the model holds, under our names, already sliced."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import torch

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.rules import check_tensor_parallel, checkpoint_shapes, rules_of, shard_bounds
from common.checkpoint.sources import DummySource, SafetensorsFolder, TensorSource
from common.errors import ConfigError

logger = logging.getLogger(__name__)
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
        from common.checkpoint.lora import LoraSource  # here because common.checkpoint.lora stands on this module

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
