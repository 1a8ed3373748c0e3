"""The one place that knows both vocabularies of parameters: ours (q, k, v and gate, up merged along rows, experts
stacked) and the checkpoints'; and how each is cut for tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from common.checkpoint.families.names import TENSOR_NAMES, TensorNames
from common.checkpoint.model_config import ModelConfig, MoEConfig
from common.errors import ConfigError
from quant.names import Layout, Linear, Part

_QKV = "QKK"


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor, or some of its rows. `shape` holds one letter a dimension (see `dimension_sizes`).

    rows: of the whole tensor, a letter for each stretch; empty: the piece is all of it. place: of the piece among them.
    """

    name: str
    shape: str
    rows: str = ""
    place: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter: its pieces' slices of dimension `split` (None: replicated), stacked along dimension 0.

    num_experts: above 0 the pieces are those of one expert after the other, a rank has whole experts, and the parameter
    has their number as its first dimension. dtype: whatever the model's is.
    """

    name: str
    split: int | None
    pieces: tuple[Piece, ...]
    num_experts: int = 0
    dtype: Literal["float32"] | None = None


def rules_of(config: ModelConfig, stored: Collection[str] = ()) -> list[Rule]:
    """One rule for every parameter of the model. stored: see `embedding_and_head`."""
    names = TENSOR_NAMES[config.family]
    embed, head = embedding_and_head(config, stored)
    layers = [rule for layer in range(config.num_layers) for rule in _layer_rules(config, names, layer)]
    return [
        Rule("embed_tokens.weight", None, (Piece(embed, "VD"),)),
        *layers,
        _rule("norm.weight", None, "D", names.norm),
        Rule("lm_head.weight", 0, (Piece(head, "VD"),)),
    ]


def quantizable(config: ModelConfig, tp_rank: int = 0, tp_size: int = 1) -> Layout:
    """The linears of decoder layers, as `quant` wants them; of a rank its share. Raises ConfigError."""
    check_tensor_parallel(config, tp_size)
    names = TENSOR_NAMES[config.family]
    return Layout(
        tuple(_linears(config, tp_rank, tp_size)), config.num_layers, names.layer, config.num_heads,
        config.num_kv_heads, config.head_size, f"{names.head}.weight" if config.tie_word_embeddings else None,
    )  # fmt: skip


def _linears(config: ModelConfig, tp_rank: int, tp_size: int) -> Iterator[Linear]:
    sizes = dimension_sizes(config)
    for layer in range(config.num_layers):
        for rule in _layer_rules(config, TENSOR_NAMES[config.family], layer):
            is_linear = rule.split is not None or rule.num_experts > 0
            if not is_linear or rule.name.endswith(".bias"):
                continue
            parts = [
                Part(
                    piece.name.removesuffix(".weight"),
                    (sum(sizes[row] for row in piece.rows or piece.shape[0]), sizes[piece.shape[1]]),
                    *slices,
                )
                for piece, slices in pieces_of_rank(config, rule, tp_rank, tp_size)
            ]
            kind = rule.name.removeprefix(f"layers.{layer}.").removesuffix(".weight")
            adds_bias = rule.split != 1 or tp_rank == 0
            yield Linear(layer, kind, tuple(parts), rule.num_experts // tp_size, adds_bias)


def embedding_and_head(config: ModelConfig, stored: Collection[str] = ()) -> tuple[str, str]:
    """The tensors of both; one where the config ties them.

    stored: the checkpoint's tensors. A tied model's head is read if it is there, and serves as the embedding too where
    that is missing, as transformers 5 does.
    """
    names = TENSOR_NAMES[config.family]
    embed, head = f"{names.embed}.weight", f"{names.head}.weight"
    if not config.tie_word_embeddings:
        return embed, head
    if head not in stored or not names.has_own_head:
        return embed, embed
    return (embed if embed in stored else head), head


def checkpoint_shapes(config: ModelConfig, stored: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model reads, by its checkpoint name. stored: see `embedding_and_head`."""
    sizes = dimension_sizes(config)
    pieces = [piece for rule in rules_of(config, stored) for piece in rule.pieces]
    return {
        piece.name: (sum(sizes[row] for row in piece.rows or piece.shape[0]), *(sizes[s] for s in piece.shape[1:]))
        for piece in pieces
    }


def dimension_sizes(config: ModelConfig) -> dict[str, int]:
    """What the letters of a shape stand for: V vocabulary, D width, I intermediate, Q query, K key or value width, H
    head; E experts, X intermediate of an expert, S of all shared experts together."""
    sizes = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "I": config.intermediate_size,
        "Q": config.num_heads * config.head_size,
        "K": config.num_kv_heads * config.head_size,
        "H": config.head_size,
    }
    if config.moe is not None:
        inner = config.moe.intermediate_size
        sizes |= {"E": config.moe.num_experts, "X": inner, "S": inner * config.moe.num_shared_experts}
    return sizes


def pieces_of_rank(
    config: ModelConfig, rule: Rule, tp_rank: int, tp_size: int
) -> Iterator[tuple[Piece, tuple[slice, ...]]]:
    """What one rank reads for a parameter: each of its pieces, and the part of the checkpoint's tensor."""
    pieces = rule.pieces
    if rule.num_experts:
        per_expert = len(pieces) // rule.num_experts
        first, last = shard_bounds(rule.num_experts, tp_rank, tp_size)
        pieces = pieces[first * per_expert : last * per_expert]
    sizes = dimension_sizes(config)
    for piece in pieces:
        before = sum(sizes[row] for row in piece.rows[: piece.place])
        bounds = [(0, sizes[letter]) for letter in piece.shape]
        if rule.split is not None:
            letter = piece.shape[rule.split]
            bounds[rule.split] = _bounds(config, letter, sizes[letter], tp_rank, tp_size)
        bounds[0] = before + bounds[0][0], before + bounds[0][1]
        yield piece, tuple(slice(*ends) for ends in bounds)


def shard_bounds(size: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """[start, stop) of one rank's share: ceil(size / tp_size) each, the last ones smaller where it does not divide."""
    assert 0 <= tp_rank < tp_size, "tp_rank counts from 0 to tp_size - 1"
    share = -(-size // tp_size)
    return min(size, tp_rank * share), min(size, (tp_rank + 1) * share)


def fits_tensor_parallel(config: ModelConfig, tp_size: int) -> bool:
    """Whether the model can be cut for so many ranks."""
    return not _uneven(config, tp_size)


def check_tensor_parallel(config: ModelConfig, tp_size: int) -> None:
    """Heads, KV heads, the MLP and experts must divide over the tp axis. Raises ConfigError with the sizes that do."""
    uneven = _uneven(config, tp_size)
    if uneven:
        valid = [n for n in range(1, config.num_heads + 1) if fits_tensor_parallel(config, n)]
        raise ConfigError(
            f"tensor_parallel_size {tp_size} does not divide {' and '.join(uneven)}: "
            f"set it to {' or '.join(map(str, valid))}"
        )


def _uneven(config: ModelConfig, tp_size: int) -> list[str]:
    """Return the sizes that do not divide. Where ranks are more than KV heads, as many ranks share each."""
    sizes = dimension_sizes(config)
    split = {"heads": config.num_heads, "intermediate_size": config.intermediate_size}
    if config.moe is not None:
        split |= {"experts": config.moe.num_experts, "shared experts' intermediate size": sizes["S"]}
    uneven = [f"{size} {name}" for name, size in split.items() if size % tp_size]
    if config.num_kv_heads % tp_size and tp_size % config.num_kv_heads:
        uneven.insert(1 if config.num_heads % tp_size else 0, f"{config.num_kv_heads} KV heads")
    return uneven


def _bounds(config: ModelConfig, letter: str, size: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    ranks_a_head = max(1, tp_size // config.num_kv_heads) if letter == "K" else 1
    return shard_bounds(size, tp_rank // ranks_a_head, tp_size // ranks_a_head)


def _layer_rules(config: ModelConfig, names: TensorNames, layer: int) -> Iterator[Rule]:
    ours, theirs = f"layers.{layer}.", names.layer.format(i=layer)
    yield _rule(f"{ours}input_norm.weight", None, "D", theirs + names.input_norm)
    yield _qkv_rule(names, ours, theirs, "weight", "D")
    if config.attention_bias:
        yield _qkv_rule(names, ours, theirs, "bias", "")
    if config.qk_norm:
        for part, name in zip("qk", names.qk_norm, strict=True):
            yield _rule(f"{ours}qk_norm.{part}_weight", None, "H", theirs + name)
    yield _rule(f"{ours}o_proj.weight", 1, "DQ", theirs + names.o)
    yield _rule(f"{ours}post_attention_norm.weight", None, "D", theirs + names.post_attention_norm)
    if config.moe is not None and config.is_moe_layer(layer):
        yield from _moe_rules(config.moe, names, f"{ours}moe.", theirs)
    else:
        yield from _mlp_rules(names, ours, theirs + names.dense, "I")


def _moe_rules(moe: MoEConfig, names: TensorNames, ours: str, theirs: str) -> Iterator[Rule]:
    yield Rule(f"{ours}router", None, (Piece(theirs + names.router, "ED"),), dtype="float32")
    if moe.has_expert_bias:
        yield Rule(f"{ours}expert_bias", None, (Piece(theirs + names.expert_bias, "E"),), dtype="float32")
    experts = [theirs + names.expert.format(e=expert) for expert in range(moe.num_experts)]
    gate, up, down = (f"{name}.weight" for name in names.mlp)
    gate_up = tuple(Piece(expert + part, "XD") for expert in experts for part in (gate, up))
    yield Rule(f"{ours}experts_gate_up", None, gate_up, moe.num_experts)
    yield Rule(f"{ours}experts_down", None, tuple(Piece(expert + down, "DX") for expert in experts), moe.num_experts)
    if moe.num_shared_experts:
        yield from _mlp_rules(names, f"{ours}shared_", theirs + names.shared, "S")


def _mlp_rules(names: TensorNames, ours: str, theirs: str, inner: str) -> Iterator[Rule]:
    gate, up, down = (theirs + name for name in names.mlp)
    yield _rule(f"{ours}gate_up_proj.weight", 0, f"{inner}D {inner}D", gate, up)
    yield _rule(f"{ours}down_proj.weight", 1, f"D{inner}", down)


def _qkv_rule(names: TensorNames, ours: str, theirs: str, leaf: str, columns: str) -> Rule:
    modules = [f"{theirs}{module}.{leaf}" for module in names.qkv]
    if len(modules) == 1:
        pieces = tuple(Piece(modules[0], row + columns, _QKV, place) for place, row in enumerate(_QKV))
    else:
        pieces = tuple(Piece(module, row + columns) for module, row in zip(modules, _QKV, strict=True))
    return Rule(f"{ours}qkv_proj.{leaf}", 0, pieces)


def _rule(name: str, split: int | None, shapes: str, *modules: str) -> Rule:
    """Make a rule of modules whose leaf is `weight`."""
    pieces = (Piece(f"{module}.weight", shape) for module, shape in zip(modules, shapes.split(), strict=True))
    return Rule(name, split, tuple(pieces))
