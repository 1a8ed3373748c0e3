"""What every family's config.json says of its decoder, under the keys of the Qwen and Llama configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from common.checkpoint.families.fields import FIX, MOST_HEADS, MOST_LAYERS, MOST_TOKENS, Fields
from common.checkpoint.families.tokens import mask_token_id, pad_token_id, stop_token_ids
from common.checkpoint.folder import shown
from common.checkpoint.model_config import BlockOrigin, Family, ModelConfig, MoEConfig

_SMALLEST_EPS = 1e-45  # float32's smallest number above 0
_LEAST_THETA, _LARGEST_THETA = 1.0, 1e12


def read_decoder(
    fields: Fields,
    family: Family,
    *,
    shift: Literal[0, 1],
    block_origin: BlockOrigin,
    qk_norm: bool = False,
    attention_bias: bool = False,
    rotary_share: float = 1.0,
    rounds_rotary: bool = True,
    block_size_key: str | None = None,
    mask_text: str | None = None,
    turn_end: str | None = None,
    moe: MoEConfig | None = None,
) -> ModelConfig:
    """The config with what the caller knows of the family. mask_text: the mask token, where the config may not name it.
    turn_end: a token that ends an answer beside those of the config.

    Raises ConfigError by file and key.
    """
    fields.only("hidden_act", "silu")
    fields.only("use_sliding_window", False)
    vocab_size = fields.integer("vocab_size", at_most=MOST_TOKENS)
    stop_ids = stop_token_ids(fields, vocab_size, turn_end)
    num_heads = fields.integer("num_attention_heads", at_most=MOST_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", at_most=MOST_HEADS)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} heads; {FIX}")
    head_size = _head_size(fields, num_heads)
    has_block_size = block_size_key is not None and fields.get(block_size_key) is not None
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=0 if moe is not None and moe.first_dense == 0 else fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", at_most=MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rope_theta=_rope_theta(fields),
        rms_norm_eps=fields.number("rms_norm_eps", at_least=_SMALLEST_EPS, at_most=1),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        mask_token_id=mask_token_id(fields, vocab_size, stop_ids, mask_text),
        eos_token_id=stop_ids[0],
        stop_token_ids=stop_ids,
        pad_token_id=pad_token_id(fields, vocab_size, stop_ids[0]),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        shift=shift,
        block_origin=block_origin,
        block_size=fields.integer(block_size_key) if block_size_key and has_block_size else None,
        qk_norm=qk_norm,
        attention_bias=attention_bias,
        rotary_size=_rotary_size(fields, head_size, rotary_share),
        rounds_rotary=rounds_rotary,
        moe=moe,
    )


def _head_size(fields: Fields, num_heads: int) -> int:
    if fields.get("head_dim") is not None:
        head_size = fields.integer("head_dim")
    else:
        head_size, rest = divmod(fields.integer("hidden_size"), num_heads)
        if rest:
            raise fields.error("num_attention_heads", f"{num_heads} does not divide hidden_size; {FIX}")
    if head_size % 2:
        raise fields.error("head_dim", f"heads of odd size {head_size} cannot be rotated in pairs; {FIX}")
    return head_size


def _rotary_size(fields: Fields, head_size: int, share: float) -> int:
    size = int(head_size * share)
    if size % 2 or not size:
        raise fields.error(
            "partial_rotary_factor", f"{share:g} of heads of {head_size} is no even number of dimensions; {FIX}"
        )
    return size


def _rope_theta(fields: Fields) -> float:
    """transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 both inside `rope_parameters`."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.get(key)
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


def _theta(fields: Fields, key: str, value: Any = None) -> float:
    return fields.number(key, value, at_least=_LEAST_THETA, at_most=_LARGEST_THETA)
