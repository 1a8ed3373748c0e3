"""What each family calls its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.checkpoint.model_config import Family


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Modules of a checkpoint. Names of a layer begin with `layer`, where {i} is its number.

    qkv: three modules, or one whose rows are all of q, then k, then v. mlp: gate, up and down, also of an expert, whose
    names begin with `expert`, where {e} is its number, and of the shared experts. has_own_head: whether the published
    model has a head to load where it is tied to the embedding.
    """

    embed: str
    layer: str
    input_norm: str
    qkv: tuple[str, ...]
    qk_norm: tuple[str, str]
    o: str
    post_attention_norm: str
    mlp: tuple[str, str, str]
    norm: str
    head: str
    dense: str = "mlp."
    router: str = "mlp.gate.weight"
    expert_bias: str = "mlp.gate.expert_bias"
    expert: str = "mlp.experts.{e}."
    shared: str = "mlp.shared_experts."
    has_own_head: bool = True


_LLAMA = TensorNames(
    embed="model.embed_tokens",
    layer="model.layers.{i}.",
    input_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    qk_norm=("self_attn.q_norm", "self_attn.k_norm"),
    o="self_attn.o_proj",
    post_attention_norm="post_attention_layernorm",
    mlp=("gate_proj", "up_proj", "down_proj"),
    norm="model.norm",
    head="lm_head",
)
_LLADA = TensorNames(
    embed="model.transformer.wte",
    layer="model.transformer.blocks.{i}.",
    input_norm="attn_norm",
    qkv=("q_proj", "k_proj", "v_proj"),
    qk_norm=("q_norm", "k_norm"),
    o="attn_out",
    post_attention_norm="ff_norm",
    mlp=("ff_proj", "up_proj", "ff_out"),
    norm="model.transformer.ln_f",
    head="model.transformer.ff_out",  # a layer's ff_out is its down projection
    dense="",
    has_own_head=False,
)
TENSOR_NAMES: Mapping[Family, TensorNames] = {
    "dream": _LLAMA,
    "llada": _LLADA,
    "sdar": _LLAMA,
    "sdar_moe": _LLAMA,
    "fast_dllm_v2": _LLAMA,
    "stable_diffcoder": _LLAMA,
    "llada2_moe": replace(
        _LLAMA,
        embed="model.word_embeddings",
        qkv=("attention.query_key_value",),
        qk_norm=("attention.query_layernorm", "attention.key_layernorm"),
        o="attention.dense",
    ),
}
