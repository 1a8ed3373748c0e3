"""The dense families: Dream and DiffuCoder, LLaDA, SDAR, Fast-dLLM v2, Stable-DiffCoder.

A reader says what the config does not, and refuses what would make another model of it.
"""

from __future__ import annotations

from common.checkpoint.families.decoder import read_decoder
from common.checkpoint.families.fields import Fields
from common.checkpoint.model_config import ModelConfig

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
    return read_decoder(fields, "dream", shift=1, block_origin="prompt_end", attention_bias=True)


def read_llada(fields: Fields) -> ModelConfig:
    """LLaDA and LLaDA-1.5: a Llama under OLMo's names, bidirectional; cos and sin stay float32."""
    fields = fields.called(_LLADA_NAMES)
    fields.only("block_type", "llama")
    fields.only("layer_norm_type", "rms")
    fields.only("rope", True)
    for key in (
        "alibi", "include_bias", "include_qkv_bias", "bias_for_layer_norm", "attention_layer_norm", "input_emb_norm",
        "scale_logits", "multi_query_attention",
    ):  # fmt: skip
        fields.only(key, False)
    fields.only("block_group_size", 1)
    return read_decoder(
        fields, "llada", shift=0, block_origin="prompt_end",
        rounds_rotary=not fields.flag("rope_full_precision", default=True), mask_text="<|mdm_mask|>",
        turn_end="<|eot_id|>",
    )  # fmt: skip


def read_sdar(fields: Fields) -> ModelConfig:
    """SDAR and TraDo: Qwen3, block-causal from position 0."""
    fields.only("attention_bias", False)
    return read_decoder(
        fields, "sdar", shift=0, block_origin="zero", qk_norm=True, block_size_key="block_size", mask_text="<MASK>"
    )


def read_fast_dllm_v2(fields: Fields) -> ModelConfig:
    """Qwen2.5, block-causal from position 0; the config has no mask token."""
    return read_decoder(
        fields, "fast_dllm_v2", shift=1, block_origin="zero", attention_bias=True, block_size_key="bd_size",
        mask_text="|<MASK>|",
    )  # fmt: skip


def read_stable_diffcoder(fields: Fields) -> ModelConfig:
    """Llama, block-causal from position 0; the config has no mask token."""
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    return read_decoder(
        fields, "stable_diffcoder", shift=0, block_origin="zero", block_size_key="block_size",
        mask_text="<[MASK_TOKEN]>",
    )  # fmt: skip
