"""What every family's config.json says of its decoder, under the keys of the Qwen and Llama configs."""

from __future__ import annotations

from typing import Literal

from common.checkpoint.families.fields import FIX, MOST_HEADS, MOST_LAYERS, MOST_TOKENS, Fields
from common.checkpoint.families.rotary import read_rotary, rotary_size
from common.checkpoint.families.tokens import mask_token_id, stop_token_ids
from common.checkpoint.folder import shown
from common.checkpoint.model_config import BlockOrigin, Family, ModelConfig, MoEConfig

_SMALLEST_EPS = 1e-45  # float32's smallest number above 0


def read_decoder(
    fields: Fields,
    family: Family,
    *,
    shift: Literal[0, 1],
    block_origin: BlockOrigin,
    qk_norm: bool = False,
    attention_bias: bool = False,
    rounds_rotary: bool = True,
    mlp_ratio: int | None = None,
    block_size_key: str | None = None,
    mask_text: str | None = None,
    turn_end: str | None = None,
    moe: MoEConfig | None = None,
) -> ModelConfig:
    """The config with what the caller knows of the family. mlp_ratio: of an MLP's width to the model's, where the file
    does not say the width. mask_text: the mask token, where the config may not name it. turn_end: a token that ends an
    answer beside those of the config.

    Raises ConfigError by file and key.
    """
    fields.only("hidden_act", "silu", "swish")
    fields.only("per_layer_config", None, {})
    num_layers = fields.integer("num_hidden_layers", at_most=MOST_LAYERS)
    _check_every_layer_sees_all(fields, num_layers)
    vocab_size = fields.integer("vocab_size", at_most=MOST_TOKENS)
    stop_ids = stop_token_ids(fields, vocab_size, turn_end)
    num_heads = fields.integer("num_attention_heads", at_most=MOST_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", at_most=MOST_HEADS, null=num_heads if moe is None else None)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} heads; {FIX}")
    head_size, rotary = _head_size(fields, num_heads), read_rotary(fields)
    hidden_size = fields.integer("hidden_size")
    mlp_size = None if mlp_ratio is None else mlp_ratio * hidden_size
    has_block_size = block_size_key is not None and fields.get(block_size_key) is not None
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=0 if moe and moe.first_dense == 0 else fields.integer("intermediate_size", null=mlp_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rope_theta=rotary.theta,
        rms_norm_eps=fields.number("rms_norm_eps", at_least=_SMALLEST_EPS, at_most=1),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        mask_token_id=mask_token_id(fields, vocab_size, stop_ids, mask_text),
        eos_token_id=stop_ids[0],
        stop_token_ids=stop_ids,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        shift=shift,
        block_origin=block_origin,
        block_size=fields.integer(block_size_key) if block_size_key and has_block_size else None,
        qk_norm=qk_norm,
        attention_bias=attention_bias,
        rotary_size=rotary_size(fields, head_size, rotary.share),
        rounds_rotary=rounds_rotary,
        moe=moe,
    )


def _head_size(fields: Fields, num_heads: int) -> int:
    if fields.get("head_dim") is not None or fields.is_known("head_dim"):
        head_size = fields.integer("head_dim")
    else:
        head_size, rest = divmod(fields.integer("hidden_size"), num_heads)
        if rest:
            raise fields.error("num_attention_heads", f"{num_heads} does not divide hidden_size; {FIX}")
    if head_size % 2:
        raise fields.error("head_dim", f"heads of odd size {head_size} cannot be rotated in pairs; {FIX}")
    return head_size


def _check_every_layer_sees_all(fields: Fields, num_layers: int) -> None:
    """Sliding windows are not implemented; what switches them off does nothing. Raises ConfigError."""
    layer_types = fields.get("layer_types")
    if layer_types is not None:
        if layer_types != ["full_attention"] * num_layers:
            problem = f"{shown(layer_types)} is not implemented, only full_attention {num_layers} times"
            raise fields.error("layer_types", f"{problem}; use another checkpoint")
        if fields.is_known("layer_types"):
            return
    if not fields.flag("use_sliding_window") or fields.get("sliding_window") is None:
        return
    if not fields.is_known("max_window_layers") or fields.integer("max_window_layers", at_least=0) < num_layers:
        fields.only("use_sliding_window", False)
