"""The dense families: Dream and DiffuCoder, LLaDA, SDAR, Fast-dLLM v2, Stable-DiffCoder.

A reader says what the config does not, and refuses what would make another model of it. The tables are the defaults of
the published classes, for keys that a file may leave out; sizes that make the model it must have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.checkpoint.families.decoder import read_decoder
from common.checkpoint.families.fields import Fields
from common.checkpoint.model_config import ModelConfig

QWEN: Mapping[str, Any] = {
    "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "use_sliding_window": False, "sliding_window": 4096, "tie_word_embeddings": False,
}  # fmt: skip
_DREAM = {**QWEN, "max_window_layers": 28, "mask_token_id": 151666}
_SDAR = {**QWEN, "max_window_layers": 28, "layer_types": None, "head_dim": 128, "attention_bias": False}
_FAST_DLLM = {**QWEN, "max_window_layers": 28, "layer_types": None, "bd_size": 32}
_LLAMA = {
    "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "eos_token_id": 2,
}  # fmt: skip
_LLADA = {
    "block_type": "sequential", "layer_norm_type": "default", "layer_norm_with_affine": True, "hidden_act": "swiglu",
    "rope": False, "rope_full_precision": True, "rope_theta": 1e4, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "mlp_ratio": 4, "tie_word_embeddings": True,
}  # fmt: skip
_LLADA_NAMES = {
    "vocab_size": "embedding_size",
    "hidden_size": "d_model",
    "intermediate_size": "mlp_hidden_size",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "weight_tying",
    "hidden_act": "activation_type",
}


def read_dream(fields: Fields) -> ModelConfig:
    """Qwen2.5, bidirectional, with bias on q, k and v."""
    return read_decoder(fields.read_by(_DREAM), "dream", shift=1, block_origin="prompt_end", attention_bias=True)


def read_llada(fields: Fields) -> ModelConfig:
    """LLaDA and LLaDA-1.5: a Llama under OLMo's names, bidirectional; cos and sin stay float32."""
    names = dict(_LLADA_NAMES)
    if fields.has("embedding_size") and fields.get("embedding_size") is None:
        names["vocab_size"] = "vocab_size"
    fields = fields.read_by(_LLADA, names)
    fields.only("block_type", "llama")
    fields.only("layer_norm_type", "rms")
    fields.only("layer_norm_with_affine", True)
    fields.only("rope", True)
    fields.only("hidden_act", "silu")
    for key in (
        "alibi", "include_bias", "include_qkv_bias", "bias_for_layer_norm", "attention_layer_norm", "input_emb_norm",
        "scale_logits", "multi_query_attention",
    ):  # fmt: skip
        fields.only(key, False)
    fields.only("block_group_size", 1)
    if fields.get("multi_query_attention") is False and fields.get("num_key_value_heads") is not None:
        fields.only("num_key_value_heads", fields.integer("num_attention_heads"))
    return read_decoder(
        fields, "llada", shift=0, block_origin="prompt_end", rounds_rotary=not fields.flag("rope_full_precision"),
        mlp_ratio=fields.integer("mlp_ratio"), mask_text="<|mdm_mask|>", turn_end="<|eot_id|>",
    )  # fmt: skip


def read_sdar(fields: Fields) -> ModelConfig:
    """SDAR and TraDo: Qwen3, block-causal from position 0."""
    fields = fields.read_by(_SDAR)
    fields.only("attention_bias", False)
    return read_decoder(
        fields, "sdar", shift=0, block_origin="zero", qk_norm=True, block_size_key="block_size", mask_text="<MASK>"
    )


def read_fast_dllm_v2(fields: Fields) -> ModelConfig:
    """Qwen2.5, block-causal from position 0; the config has no mask token."""
    return read_decoder(
        fields.read_by(_FAST_DLLM), "fast_dllm_v2", shift=1, block_origin="zero", attention_bias=True,
        block_size_key="bd_size", mask_text="|<MASK>|",
    )  # fmt: skip


def read_stable_diffcoder(fields: Fields) -> ModelConfig:
    """Llama, block-causal from position 0; the config has no mask token."""
    fields = fields.read_by(_LLAMA)
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    return read_decoder(
        fields, "stable_diffcoder", shift=0, block_origin="zero", block_size_key="block_size",
        mask_text="<[MASK_TOKEN]>",
    )  # fmt: skip
