"""Checkpoint folder in, this rank's parameters out: every tensor the model holds, under our names, already sliced."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal

import torch

from common.checkpoint.families.quantized import UNQUANTIZED
from common.checkpoint.folder import has_file, plain, shown
from common.checkpoint.lora import LoraSource
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.rules import (
    Piece,
    Rule,
    check_tensor_parallel,
    checkpoint_shapes,
    embedding_and_head,
    pieces_of_rank,
    rules_of,
)
from common.checkpoint.sanity import allocated, check_finite, check_memory, look_finite
from common.checkpoint.sources import DummySource, GivenTensors, SafetensorsFolder, Slices, TensorSource
from common.errors import ConfigError

logger = logging.getLogger(__name__)
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_NAMED = 20
_RECOMPUTED = ".rotary_emb.inv_freq"  # older checkpoints store it
_PACKED = ("qweight", "weight_packed", "weight_q", "weight_int8", "SCB", "absmax", "B")  # instead of a weight


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
    tensors: Mapping[str, torch.Tensor] | None = None,
    without: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """This rank's parameters by our names (see `rules_of`); dummy weights read no file of `folder`.

    source: a quantized folder's tensors, each of which has to be used. tensors: by the checkpoint's names, on any
    device. Without either the folder's own are read. without: parameters, by our names, that come from elsewhere.
    Raises ConfigError naming file, tensor and fix, EngineError where they do not fit into memory.
    """
    check_tensor_parallel(config, tp_size)
    is_quantized = source is not None
    if tensors is not None:
        source = GivenTensors(tensors)
    elif source is None and load_format == "dummy":
        source = DummySource(config, dtype, seed, device)
    elif source is None:
        _check_no_adapter(Path(folder), lora_path)
        source = SafetensorsFolder(folder)
    rules = [rule for rule in rules_of(config, source.names()) if rule.name not in without]
    shapes = checkpoint_shapes(config, source.names())
    _check_expert_bias(source, config)
    unused = sorted(set(source.names()) - shapes.keys())
    if is_quantized:
        _refuse_unused(source, unused)
    elif tp_rank == 0:
        _warn_of_unused(unused)
    shares = _Shares(source, config, shapes, tp_rank, tp_size, dtype)
    shares.check(rules, device)
    if tp_rank == 0:
        _warn_of_own_head(source, config)
    if lora_path is not None:
        shares = replace(shares, source=LoraSource(source, lora_path, config))
    weights = {rule.name: shares.parameter(rule, device) for rule in rules}
    if load_format != "dummy" and not look_finite(weights.values()):
        shares.check_finite(rules)
    return weights


@dataclass(frozen=True, slots=True)
class _Shares:
    """What one rank reads of a source's tensors. Errors name file and tensor."""

    source: TensorSource
    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    tp_rank: int
    tp_size: int
    dtype: torch.dtype

    def check(self, rules: Sequence[Rule], device: torch.device | str) -> None:
        """Check, before gigabytes are read, that every tensor is there with the shape that config.json says, and that
        all fit."""
        num_bytes = 0
        for rule in rules:
            for piece in rule.pieces:
                _check_tensor(self.source, piece.name, self.shapes[piece.name])
            for _, slices in self._pieces(rule):
                num_bytes += self._dtype(rule).itemsize * prod(_sizes(slices))
        check_memory(num_bytes, device)

    def parameter(self, rule: Rule, device: torch.device | str) -> torch.Tensor:
        pieces = list(self._pieces(rule))
        num_rows, columns = sum(_sizes(slices)[0] for _, slices in pieces), _sizes(pieces[0][1])[1:]
        # Copied even where nothing changes: a part read from a file may still be backed by it.
        with allocated(rule.name):
            stacked = torch.empty((num_rows, *columns), dtype=self._dtype(rule), device=device)
        row = 0
        for piece, slices in pieces:
            part = self._read(piece.name, slices)
            stacked[row : row + len(part)].copy_(part)
            row += len(part)
        if not rule.num_experts:
            return stacked
        return stacked.view(-1, num_rows * len(rule.pieces) // (len(pieces) * rule.num_experts), *columns)

    def check_finite(self, rules: Sequence[Rule]) -> None:
        """Read all again, every value of it, to name the tensor that is not."""
        for rule in rules:
            for piece, slices in self._pieces(rule):
                where = f"{self.source.where(piece.name)}: {piece.name}"
                check_finite(self._read(piece.name, slices), self._dtype(rule), where)

    def _pieces(self, rule: Rule) -> Iterator[tuple[Piece, Slices]]:
        return pieces_of_rank(self.config, rule, self.tp_rank, self.tp_size)

    def _dtype(self, rule: Rule) -> torch.dtype:
        return torch.float32 if rule.dtype == "float32" else self.dtype

    def _read(self, name: str, slices: Slices) -> torch.Tensor:
        share = self.source.read(name, slices)
        if share.dtype not in _FLOAT_DTYPES:
            raise ConfigError(
                f"{self.source.where(name)}: {name}: holds {share.dtype}, quantized weights in a form that is not "
                f"read; {UNQUANTIZED}"
            )
        return share


def _sizes(slices: Slices) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in slices)


def _check_tensor(source: TensorSource, name: str, shape: tuple[int, ...]) -> None:
    if name not in source.names():
        raise ConfigError(f"{source.where(name)}: {name}: missing; {_why_missing(source, name)}")
    found = source.shape(name)
    if found != shape:
        raise ConfigError(
            f"{source.where(name)}: {name}: shape {shown(list(found))}, but config.json says {list(shape)}; use files "
            "that match"
        )


def _why_missing(source: TensorSource, name: str) -> str:
    module, _, leaf = name.rpartition(".")
    others = sorted(other for other in source.names() if other.startswith(f"{module}.") and leaf == "weight")
    quantized = next((other for other in others if other.rpartition(".")[2] in _PACKED), None)
    if quantized is not None:
        return f"{plain(quantized)} in its place are quantized weights in a form that is not read; {UNQUANTIZED}"
    return "the checkpoint is incomplete or of another family"


def _check_no_adapter(folder: Path, lora_path: str | None) -> None:
    if lora_path is None and has_file(folder / "adapter_config.json"):
        raise ConfigError(
            f"{folder / 'adapter_config.json'}: a LoRA beside the model's own weights; set `lora_path` to this folder "
            "to merge it, or move its files away"
        )


def _check_expert_bias(source: TensorSource, config: ModelConfig) -> None:
    """Refuse a bias that config.json denies: the published code of LLaDA2 adds it all the same."""
    if config.family != "llada2_moe" or config.moe is None or config.moe.has_expert_bias:
        return
    for name in source.names():
        if name.endswith(".expert_bias"):
            raise ConfigError(
                f"{source.where(name)}: {plain(name)}: is there, but config.json says moe_router_enable_expert_bias "
                "false; correct either"
            )


def _warn_of_own_head(source: TensorSource, config: ModelConfig) -> None:
    embed, head = embedding_and_head(config, source.names())
    if config.tie_word_embeddings and embed != head and not torch.equal(source.read(embed), source.read(head)):
        logger.warning(
            "%s: %s is used, which differs from %s although config.json ties them", source.where(head), head, embed
        )


def _refuse_unused(source: TensorSource, unused: Sequence[str]) -> None:
    """Quantized weights may be right only together with a tensor that a tool has added, such as an online rotation."""
    found = [name for name in unused if not name.endswith(_RECOMPUTED)]
    if found:
        raise ConfigError(
            f"{source.where(found[0])}: {plain(found[0])}: this model does not read it, and the quantized weights may "
            "need it, such as an online rotation; quantize again without this feature, or without this tensor if it "
            "was unused in the float model"
        )


def _warn_of_unused(unused: Sequence[str]) -> None:
    if unused:
        named = [plain(name) for name in unused[:_MOST_NAMED]] + ["..."] * (len(unused) > _MOST_NAMED)
        logger.warning("%d tensors of the checkpoint are not used: %s", len(unused), ", ".join(named))
