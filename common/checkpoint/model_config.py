"""What a checkpoint's config.json says about its model: the first file every load reads.

Weights, tokenizer and engines work with the checked numbers of `ModelConfig`; none of them sees the JSON. Code beside
the config.json (`auto_map`) is never imported: a family is supported when it has a reader in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint.folder import existing_folder, is_file, shown
from common.checkpoint.json_file import read_json_object
from common.errors import ConfigError

_LARGEST = 2**31  # of any size: beyond it, indices of tensors do not fit
_MOST_LAYERS = 1000
_MOST_HEADS = 2**16
_MOST_TOKENS = 2**24  # token ids travel as float32, which is exact up to here
_SMALLEST_EPS = 1e-45  # float32's smallest number above 0
_LEAST_THETA, _LARGEST_THETA = 1.0, 1e12
_FIX = "restore the file"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and ids of one checkpoint; where the files list several end tokens, `eos_token_id` is the first."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    mask_token_id: int
    eos_token_id: int
    pad_token_id: int
    tie_word_embeddings: bool


def load_model_config(folder: str | Path) -> ModelConfig:
    """Read `folder`/config.json (and generation_config.json for a missing EOS). Raises ConfigError: file, key, fix."""
    fields = _Fields(existing_folder(folder) / "config.json")
    model_type, architectures = fields.tree.get("model_type"), fields.tree.get("architectures")
    for name in [model_type, *(architectures if isinstance(architectures, list) else [])]:
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name](fields)
    raise ConfigError(
        f"{fields.path}: model_type: {shown(model_type)} is not a supported family; "
        f"supported are {', '.join(FAMILIES)} (Dream-org/Dream-v0-*, apple/DiffuCoder-7B-*)"
    )


class _Fields:
    """Typed access to a JSON file whose errors name file, key and fix."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = read_json_object(path)

    def integer(self, key: str, *, at_least: int = 1, at_most: int = _LARGEST) -> int:
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            raise self.error(
                key, f"expected an integer of at least {at_least} and at most {at_most}, found {shown(value)}; {_FIX}"
            )
        return value

    def number(self, key: str, value: Any = None, *, at_least: float, at_most: float) -> float:
        """`value`, or what the file has under the key."""
        value = self._required(key) if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not at_least <= value <= at_most:
            raise self.error(key, f"expected a number in {at_least:g}..{at_most:g}, found {shown(value)}; {_FIX}")
        return float(value)

    def flag(self, key: str) -> bool:
        """False where the key is missing."""
        value = self.tree.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {shown(value)}; {_FIX}")
        return bool(value)

    def token_id(self, key: str, value: Any, vocab_size: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise self.error(key, f"{shown(value)} is not an id of the {vocab_size} vocabulary entries; {_FIX}")
        return value

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key}: {problem}")

    def _required(self, key: str) -> Any:
        if self.tree.get(key) is None:
            raise self.error(key, f"missing; the checkpoint's own {self.path.name} has it, {_FIX}")
        return self.tree[key]


def _read_dream(fields: _Fields) -> ModelConfig:
    """Dream and DiffuCoder: the Qwen2.5 layout, bidirectional, bias on q/k/v."""
    _refuse_unsupported(fields)
    vocab_size = fields.integer("vocab_size", at_most=_MOST_TOKENS)
    eos_token_id = _eos_token_id(fields, vocab_size)
    pad_token_id = fields.tree.get("pad_token_id")
    num_heads = fields.integer("num_attention_heads", at_most=_MOST_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", at_most=_MOST_HEADS)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} heads; {_FIX}")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", at_most=_MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=_head_size(fields, num_heads),
        rope_theta=_rope_theta(fields),
        rms_norm_eps=fields.number("rms_norm_eps", at_least=_SMALLEST_EPS, at_most=1),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        mask_token_id=_mask_token_id(fields, vocab_size, eos_token_id),
        eos_token_id=eos_token_id,
        pad_token_id=eos_token_id
        if pad_token_id is None
        else fields.token_id("pad_token_id", pad_token_id, vocab_size),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
    )


def _refuse_unsupported(fields: _Fields) -> None:
    act = fields.tree.get("hidden_act", "silu")
    if act != "silu":
        raise fields.error("hidden_act", f"{shown(act)} is not implemented, only silu; use a Dream checkpoint")
    if fields.tree.get("use_sliding_window"):
        raise fields.error("use_sliding_window", "sliding-window attention is not implemented; set it to false")


def _head_size(fields: _Fields, num_heads: int) -> int:
    if fields.tree.get("head_dim") is not None:
        head_size = fields.integer("head_dim")
    else:
        head_size, rest = divmod(fields.integer("hidden_size"), num_heads)
        if rest:
            raise fields.error("num_attention_heads", f"{num_heads} does not divide hidden_size; {_FIX}")
    if head_size % 2:
        raise fields.error("head_dim", f"heads of odd size {head_size} cannot be rotated in pairs; {_FIX}")
    return head_size


def _rope_theta(fields: _Fields) -> float:
    """transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 both inside `rope_parameters`."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.tree.get(key)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else rope
        if kind != "default":
            raise fields.error(
                key, f"rope type {shown(kind)} is not implemented, only default; use an unscaled checkpoint"
            )
        if isinstance(rope, Mapping) and rope.get("rope_theta") is not None:
            return _theta(fields, f"{key}.rope_theta", rope["rope_theta"])
    return _theta(fields, "rope_theta")


def _theta(fields: _Fields, key: str, value: Any = None) -> float:
    return fields.number(key, value, at_least=_LEAST_THETA, at_most=_LARGEST_THETA)


def _mask_token_id(fields: _Fields, vocab_size: int, eos_token_id: int) -> int:
    mask_token_id = fields.token_id("mask_token_id", fields.integer("mask_token_id", at_least=0), vocab_size)
    if mask_token_id == eos_token_id:
        raise fields.error(
            "mask_token_id", f"{mask_token_id} is the end token too, so that no text could have an end; {_FIX}"
        )
    return mask_token_id


def _eos_token_id(fields: _Fields, vocab_size: int) -> int:
    generation_path = fields.path.with_name("generation_config.json")
    sources = [fields]
    if fields.tree.get("eos_token_id") is None and is_file(generation_path):
        sources.append(_Fields(generation_path))
    for source in sources:
        value = source.tree.get("eos_token_id")
        first = (value[0] if value else None) if isinstance(value, list) else value
        if first is not None:
            return source.token_id("eos_token_id", first, vocab_size)
    raise fields.error("eos_token_id", "missing here and in generation_config.json; add the id of the end token")


FAMILIES: Mapping[str, Callable[[_Fields], ModelConfig]] = {"Dream": _read_dream, "DreamModel": _read_dream}
