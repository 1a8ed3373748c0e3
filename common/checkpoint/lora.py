"""A PEFT LoRA folder laid over a checkpoint while it is read: W + scale * B A, in fp32, only the part a rank asks for.

Stands between the checkpoint's `TensorSource` and `load_weights`, so the merged model is an ordinary one from there
on. Rank, alpha and targets come from adapter_config.json; what would change the result and is not implemented is
refused, and every tensor of the adapter must belong to a weight that the model has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.checkpoint.json_file import read_json_object
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.rules import checkpoint_shapes
from common.checkpoint.sources import SafetensorsFolder, Slices, TensorSource
from common.errors import ConfigError

_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")

_REFUSED = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "use_qalora",
    "alora_invocation_tokens",
)
# These start training from a changed base weight, which the adapter alone does not hold.
_REFUSED_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class _Delta:
    """The tensors A [r, in] and B [out, r] of one weight, and what their product is multiplied with."""

    a_name: str
    b_name: str
    scale: float


class LoraSource:
    """`base` with the adapter of `folder` merged in. Merged weights are read as fp32, all others as `base` has them."""

    def __init__(self, base: TensorSource, folder: str | Path, config: ModelConfig) -> None:
        self._base = base
        self._adapter = SafetensorsFolder(folder, stem="adapter_model")
        self._settings = _Settings(Path(folder) / "adapter_config.json")
        shapes = {name: shape for name, shape in checkpoint_shapes(config).items() if len(shape) == 2}
        self._deltas = {weight: self._delta(weight, sides, shapes) for weight, sides in self._pairs(shapes).items()}
        self._settings.check_targets(_modules(self._deltas), _modules(shapes))

    def names(self) -> Collection[str]:
        return self._base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def where(self, name: str) -> str:
        return self._base.where(name)

    def read(self, name: str, slices: Slices = ()) -> torch.Tensor:
        weight = self._base.read(name, slices)
        if name not in self._deltas:
            return weight
        delta = self._deltas[name]
        rows, columns = slices or (slice(None), slice(None))
        b = self._adapter.read(delta.b_name, (rows, slice(None))).to(weight.device, torch.float32)
        a = self._adapter.read(delta.a_name, (slice(None), columns)).to(weight.device, torch.float32)
        return torch.addmm(weight.float(), b, a, alpha=delta.scale)

    def _pairs(self, weights: Collection[str]) -> dict[str, dict[str, str]]:
        """Weight -> its tensors by side, A and B. A tensor that no weight takes is an error that names it."""
        pairs: dict[str, dict[str, str]] = {}
        for name in self._adapter.names():
            match = _KEY.fullmatch(name)
            weight = f"{match['module']}.weight" if match else ""
            if match is None or weight not in weights:
                raise ConfigError(
                    f"{self._adapter.where(name)}: {name}: the model has no weight for it; use a LoRA of the linear "
                    "layers of this base model"
                )
            pairs.setdefault(weight, {})[match["side"]] = name
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
                    f"{self._adapter.where(sides[side])}: {sides[side]}: shape {list(found)}, but r in "
                    f"adapter_config.json and the base model ask for {list(expected)}; use the base model that the "
                    "LoRA was trained on"
                )
        return _Delta(sides["A"], sides["B"], self._settings.scale(module))


class _Settings:
    """adapter_config.json, checked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tree = read_json_object(path)
        if str(self._tree.get("peft_type", "LORA")).upper() != "LORA":
            raise self._error("peft_type", f"{self._tree['peft_type']!r} is not LORA; only LoRA adapters can be merged")
        for key in _REFUSED:
            if self._tree.get(key):
                raise self._error(key, "not supported; merge the adapter with PEFT and load the merged checkpoint")
        if self._tree.get("bias", "none") != "none":
            raise self._error("bias", "trained biases are not supported; merge the adapter with PEFT first")
        start = self._tree.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_REFUSED_STARTS):
            raise self._error(
                "init_lora_weights", f"{start} changes the base weights; merge the adapter with PEFT first"
            )

    def rank(self, module: str) -> int:
        return int(self._positive("r", self._pattern("rank_pattern", module, self._tree.get("r"))))

    def scale(self, module: str) -> float:
        alpha = self._positive("lora_alpha", self._pattern("alpha_pattern", module, self._tree.get("lora_alpha")))
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self._tree.get("use_rslora") else rank)

    def check_targets(self, modules: Collection[str], model_modules: Collection[str]) -> None:
        """The adapter's modules must be those of `target_modules` (a list; a pattern is not compared).

        As in PEFT, a target that the model does not have is no error.
        """
        targets = self._tree.get("target_modules")
        if not isinstance(targets, list):
            return
        for target in targets:
            is_of_model = any(_is_target(module, target) for module in model_modules)
            if is_of_model and not any(_is_target(module, target) for module in modules):
                raise self._error("target_modules", f"{target!r} has no tensors in the adapter; download it again")
        for module in modules:
            if not any(_is_target(module, target) for target in targets):
                raise self._error("target_modules", f"{module} has tensors but is not listed; restore the file")

    def _pattern(self, key: str, module: str, default: Any) -> Any:
        """PEFT's rule: a pattern matches the end of the module's name, from a dot on."""
        patterns = self._tree.get(key) or {}
        if not isinstance(patterns, dict):
            raise self._error(key, f"expected patterns with their values, found {patterns!r}; restore the file")
        for pattern, value in patterns.items():
            try:
                is_match = re.fullmatch(rf"(.*\.)?({pattern})", module)
            except re.error as error:
                raise self._error(key, f"{pattern!r} is no pattern ({error}); restore the file") from None
            if is_match:
                return value
        return default

    def _positive(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self._error(key, f"expected a number above 0, found {value!r}; restore the file")
        return value

    def _error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: {key}: {problem}")


def _modules(weights: Collection[str]) -> list[str]:
    return [weight.removesuffix(".weight") for weight in weights]


def _is_target(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")
