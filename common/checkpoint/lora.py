"""A PEFT LoRA folder laid over a checkpoint while it is read: W + scale * B A, in fp32, only the part a rank asks for.

Stands between the checkpoint's `TensorSource` and `load_weights`, so the merged model is an ordinary one from there
on. Rank, alpha and targets come from adapter_config.json; what would change the result and is not implemented is
refused, as are keys that are not known, and every tensor of the adapter must belong to a weight that the model has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.checkpoint.folder import existing_folder, plain, read_json_object, shown
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.rules import checkpoint_shapes, embedding_and_head
from common.checkpoint.sanity import check_finite
from common.checkpoint.sources import SafetensorsFolder, Slices, TensorSource
from common.errors import ConfigError, first_line

_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")

_REFUSED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "use_qalora",
    "alora_invocation_tokens",
)
# `fan_in_fan_out` is among them: PEFT sets it to false for linears, and nothing else is merged here.
_KNOWN = {
    "peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version",
    "r", "lora_alpha", "lora_dropout", "bias", "fan_in_fan_out", "use_rslora", "init_lora_weights", "rank_pattern",
    "alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_config",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
    "ephemeral_gpu_offload", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip
# These start training from a changed base weight, which the adapter alone does not hold.
_REFUSED_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_LAYER = re.compile(r"\.(\d{1,9})\.")
_LARGEST_RANK = 2**16
_LARGEST_ALPHA = 1e6
_FIX = "restore the file"

# Patterns of this kind take short on any name: letters, classes and lists of words, few repeats.
_WORDS = r"\((?:\?:)?(?:\w|\\\.|\|)+\)"
_PLAIN_PATTERN = re.compile(rf"\^?(?:(?:\w|\\[.dw]|\.|\[(?:\w-\w|\w)+\])[*+]?|{_WORDS})*\$?")
_LONGEST_PATTERN = 200
_MOST_CHOICES = 3  # repeats and lists of words in a pattern
_MOST_PATTERNS = 10_000
_MOST_WITH_CHOICES = 50


@dataclass(frozen=True, slots=True)
class _Delta:
    """The tensors A [r, in] and B [out, r] of one weight, and what their product is multiplied with."""

    a_name: str
    b_name: str
    scale: float


class LoraSource:
    """`base` with the adapter of `folder` merged in. Merged weights are read as fp32, all others as `base` has them."""

    def __init__(self, base: TensorSource, folder: str | Path, config: ModelConfig) -> None:
        path = existing_folder(folder, setting="lora_path")
        self._base = base
        self._adapter = SafetensorsFolder(path, stem="adapter_model")
        self._settings = _Settings(path / "adapter_config.json")
        tied = embedding_and_head(config, base.names()) if config.tie_word_embeddings else ()
        stored = checkpoint_shapes(config, base.names()).items()
        shapes = {name: shape for name, shape in stored if len(shape) == 2 and name not in tied}
        self._deltas = {weight: self._delta(weight, sides, shapes) for weight, sides in self._pairs(shapes).items()}
        if not self._deltas:
            raise ConfigError(f"{self._adapter.where('')}: holds no tensors; train or download the adapter again")
        self._settings.check_targets(_modules(self._deltas), _modules(shapes))

    def names(self) -> Collection[str]:
        return self._base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def where(self, name: str) -> str:
        """The file that holds the tensor, and the adapter's where that changes it."""
        delta, base = self._deltas.get(name), self._base.where(name)
        return base if delta is None else f"{base} with {self._adapter.where(delta.a_name)}"

    def read(self, name: str, slices: Slices = ()) -> torch.Tensor:
        weight = self._base.read(name, slices)
        if name not in self._deltas:
            return weight
        delta = self._deltas[name]
        rows, columns = slices or (slice(None), slice(None))
        b = self._factor(delta.b_name, (rows, slice(None))).to(weight.device)
        a = self._factor(delta.a_name, (slice(None), columns)).to(weight.device)
        return torch.addmm(weight.float(), b, a, alpha=delta.scale)

    def _factor(self, name: str, slices: Slices) -> torch.Tensor:
        tensor = self._adapter.read(name, slices)
        where = f"{self._adapter.where(name)}: {name}"
        if not tensor.is_floating_point():
            raise ConfigError(f"{where}: holds {tensor.dtype}, not weights; merge the adapter with the tool it is of")
        tensor = tensor.float()
        check_finite(tensor, torch.float32, where)
        return tensor

    def _pairs(self, weights: Collection[str]) -> dict[str, dict[str, str]]:
        """Weight -> its tensors by side, A and B. A tensor that no weight takes is an error that names it."""
        pairs: dict[str, dict[str, str]] = {}
        for name in self._adapter.names():
            match = _KEY.fullmatch(name)
            weight = f"{match['module']}.weight" if match else ""
            if match is None or weight not in weights:
                raise ConfigError(
                    f"{self._adapter.where(name)}: {plain(name)}: the model has no weight for it; use a LoRA of the "
                    "linear layers of this base model"
                )
            first = pairs.setdefault(weight, {}).setdefault(match["side"], name)
            if first != name:
                raise ConfigError(
                    f"{self._adapter.where(name)}: {plain(first)} and {plain(name)} are for one weight; keep the "
                    "tensors of one adapter"
                )
        return pairs

    def _delta(self, weight: str, sides: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> _Delta:
        module = weight.removesuffix(".weight")
        rank, (num_rows, num_columns) = self._settings.rank(module), shapes[weight]
        for side, expected in (("A", (rank, num_columns)), ("B", (num_rows, rank))):
            if side not in sides:
                raise ConfigError(
                    f"{self._adapter.where('')}: {module}.lora_{side}.weight: missing; download the adapter again"
                )
            found = self._adapter.shape(sides[side])
            if found != expected:
                raise ConfigError(
                    f"{self._adapter.where(sides[side])}: {sides[side]}: shape {shown(list(found))}, but r in "
                    f"adapter_config.json and the base model ask for {list(expected)}; use the base model that the "
                    "LoRA was trained on"
                )
        return _Delta(sides["A"], sides["B"], self._settings.scale(module))


class _Settings:
    """adapter_config.json, checked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tree = read_json_object(path)
        kind = self._tree.get("peft_type", "LORA")
        if not isinstance(kind, str) or kind.upper() != "LORA":
            raise self._error("peft_type", f"{shown(kind)} is not LORA; only LoRA adapters can be merged")
        for key, value in self._tree.items():
            if value and key not in _KNOWN:
                what = "not supported" if key in _REFUSED else "not known"
                raise self._error(plain(key), f"{what}; merge the adapter with PEFT and load the merged checkpoint")
        if self._tree.get("bias") not in (None, "none"):
            raise self._error("bias", "trained biases are not supported; merge the adapter with PEFT first")
        start = self._tree.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_REFUSED_STARTS):
            raise self._error(
                "init_lora_weights", f"{plain(start)} changes the base weights; merge the adapter with PEFT first"
            )
        self._use_rslora = self._tree.get("use_rslora") or False
        if not isinstance(self._use_rslora, bool):
            raise self._error("use_rslora", f"expected true or false, found {shown(self._use_rslora)}; {_FIX}")
        self._patterns_of = {key: self._patterns(key) for key in ("rank_pattern", "alpha_pattern")}

    def rank(self, module: str) -> int:
        value = self._pattern("rank_pattern", module, self._tree.get("r"))
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST_RANK:
            raise self._error("r", f"expected an integer in 1..{_LARGEST_RANK}, found {shown(value)}; {_FIX}")
        return value

    def scale(self, module: str) -> float:
        alpha = self._pattern("alpha_pattern", module, self._tree.get("lora_alpha"))
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha <= _LARGEST_ALPHA:
            raise self._error(
                "lora_alpha", f"expected a number above 0, at most {_LARGEST_ALPHA:g}, found {shown(alpha)}; {_FIX}"
            )
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self._use_rslora else rank)

    def check_targets(self, modules: Collection[str], model_modules: Collection[str]) -> None:
        """The adapter's modules must be those that PEFT would load it into: it ignores the tensors of others.

        As in PEFT, a target that the model does not have is no error. A pattern that may take long is not compared.
        """
        self._check_layers(modules)
        targets = self._tree.get("target_modules")
        if targets is None:
            return
        if isinstance(targets, str):
            pattern = None if targets == "all-linear" else self._compiled("target_modules", targets)
            for module in modules:
                if pattern is not None and not pattern.fullmatch(module):
                    raise self._error(
                        "target_modules", f"{module} has tensors but does not match {shown(targets)}; {_FIX}"
                    )
            return
        self._check_names("target_modules", targets)
        for target in targets:
            is_of_model = any(_is_target(module, target) for module in model_modules)
            if is_of_model and not any(_is_target(module, target) for module in modules):
                raise self._error("target_modules", f"{shown(target)} has no tensors in the adapter; download it again")
        for module in modules:
            if not any(_is_target(module, target) for target in targets):
                raise self._error("target_modules", f"{module} has tensors but is not listed; {_FIX}")

    def _compiled(self, key: str, pattern: str) -> re.Pattern[str] | None:
        """Return the pattern; None for one that may take long."""
        try:
            return re.compile(pattern) if _is_plain_pattern(pattern) else None
        except re.error as error:
            raise self._error(key, f"{shown(pattern)} is no pattern ({first_line(error)}); {_FIX}") from None

    def _check_names(self, key: str, names: Any) -> None:
        is_list = isinstance(names, list) and len(names) <= _MOST_PATTERNS
        if not is_list or not all(isinstance(name, str) for name in names):
            raise self._error(key, f"expected names of modules, found {shown(names)}; {_FIX}")

    def _check_layers(self, modules: Collection[str]) -> None:
        layers, excluded = self._tree.get("layers_to_transform"), self._tree.get("exclude_modules") or []
        layers = [] if layers is None else layers if isinstance(layers, list) else [layers]
        if not all(type(layer) is int for layer in layers):
            raise self._error("layers_to_transform", f"expected numbers of layers, found {shown(layers)}; {_FIX}")
        pattern = self._compiled("exclude_modules", excluded) if isinstance(excluded, str) else None
        names = [] if isinstance(excluded, str) else excluded
        self._check_names("exclude_modules", names)
        for module in modules:
            number = _LAYER.search(module)
            if layers and (number is None or int(number[1]) not in layers):
                raise self._error("layers_to_transform", f"{module} has tensors but is of no layer there; {_FIX}")
            if any(_is_target(module, name) for name in names) or (pattern and pattern.fullmatch(module)):
                raise self._error("exclude_modules", f"{module} has tensors but is excluded; {_FIX}")

    def _patterns(self, key: str) -> list[tuple[re.Pattern[str], Any]]:
        """PEFT's rule: a pattern matches the end of the module's name, from a dot on."""
        tree = self._tree.get(key) or {}
        if not isinstance(tree, dict) or len(tree) > _MOST_PATTERNS:
            raise self._error(key, f"expected patterns with their values, found {shown(tree)}; {_FIX}")
        patterns, num_with_choices = [], 0
        for pattern, value in tree.items():
            num_with_choices += _num_choices(pattern) > 0
            if not _is_plain_pattern(pattern) or num_with_choices > _MOST_WITH_CHOICES:
                raise self._error(key, f"{shown(pattern)} is no pattern of plain names; write the modules out")
            try:
                patterns.append((re.compile(rf"(.*\.)?({pattern})"), value))
            except re.error as error:
                raise self._error(key, f"{shown(pattern)} is no pattern ({first_line(error)}); {_FIX}") from None
        return patterns

    def _pattern(self, key: str, module: str, default: Any) -> Any:
        return next((value for pattern, value in self._patterns_of[key] if pattern.fullmatch(module)), default)

    def _error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: {key}: {problem}")


def _modules(weights: Collection[str]) -> list[str]:
    return [weight.removesuffix(".weight") for weight in weights]


def _num_choices(pattern: str) -> int:
    return sum(map(pattern.count, "*+("))


def _is_plain_pattern(pattern: str) -> bool:
    is_short = len(pattern) <= _LONGEST_PATTERN and _num_choices(pattern) <= _MOST_CHOICES
    return is_short and _PLAIN_PATTERN.fullmatch(pattern) is not None


def _is_target(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")
