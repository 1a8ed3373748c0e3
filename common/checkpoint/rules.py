"""The one place that knows both vocabularies of parameters: ours (q, k, v and gate, up merged along rows) and Hugging
Face's; and how each is cut for tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.checkpoint.model_config import ModelConfig
from common.errors import ConfigError


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
