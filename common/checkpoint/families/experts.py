"""The families with mixtures of experts: LLaDA2.x on Ling-2, SDAR on Qwen3-MoE."""

from __future__ import annotations

from common.checkpoint.families.decoder import read_decoder
from common.checkpoint.families.fields import FIX, MOST_LAYERS, Fields
from common.checkpoint.model_config import ModelConfig, MoEConfig

_MOST_EXPERTS = 2**14
_LARGEST_SCALING = 1e3


def read_llada2_moe(fields: Fields) -> ModelConfig:
    """LLaDA2.0 and 2.1: a sigmoid router over groups, shared experts, half of each head rotated."""
    fields.only("score_function", "sigmoid")
    fields.only("router_dtype", "fp32")
    fields.only("use_qk_norm", True)
    fields.only("use_rmsnorm", True)
    for key in ("use_bias", "use_qkv_bias", "norm_head", "expert_capacity"):
        fields.only(key, False)
    num_groups = fields.integer("n_group", at_most=_MOST_EXPERTS)
    moe = MoEConfig(
        num_experts=_divided(fields, num_groups),
        experts_per_token=fields.integer("num_experts_per_tok", at_most=_MOST_EXPERTS),
        intermediate_size=fields.integer("moe_intermediate_size"),
        num_shared_experts=fields.integer("num_shared_experts", at_least=0, at_most=_MOST_EXPERTS),
        num_groups=num_groups,
        top_groups=fields.integer("topk_group", at_most=num_groups),
        scoring="sigmoid",
        normalise=fields.flag("norm_topk_prob", default=True),
        scaling=fields.number("routed_scaling_factor", at_least=0, at_most=_LARGEST_SCALING),
        first_dense=fields.integer("first_k_dense_replace", at_least=0, at_most=MOST_LAYERS),
        has_expert_bias=fields.flag("moe_router_enable_expert_bias", default=True),
    )
    _check_enough(fields, moe)
    share = fields.number("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0), at_least=0, at_most=1)
    return read_decoder(
        fields, "llada2_moe", shift=0, block_origin="zero", qk_norm=True, rotary_share=share,
        block_size_key="block_size", mask_text="<|mask|>", turn_end="<|role_end|>", moe=moe,
    )  # fmt: skip


def read_sdar_moe(fields: Fields) -> ModelConfig:
    """Qwen3-MoE: a softmax router, no shared experts, every layer a mixture."""
    fields.only("attention_bias", False)
    fields.only("decoder_sparse_step", 1)
    fields.only("mlp_only_layers", [])
    moe = MoEConfig(
        num_experts=_divided(fields, 1),
        experts_per_token=fields.integer("num_experts_per_tok", at_most=_MOST_EXPERTS),
        intermediate_size=fields.integer("moe_intermediate_size"),
        num_shared_experts=0,
        num_groups=1,
        top_groups=1,
        scoring="softmax",
        normalise=fields.flag("norm_topk_prob"),
        scaling=1.0,
        first_dense=0,
        has_expert_bias=False,
    )
    _check_enough(fields, moe)
    return read_decoder(
        fields, "sdar_moe", shift=0, block_origin="zero", qk_norm=True, block_size_key="block_size",
        mask_text="<MASK>", moe=moe,
    )  # fmt: skip


def _divided(fields: Fields, num_groups: int) -> int:
    num_experts = fields.integer("num_experts", at_most=_MOST_EXPERTS)
    if num_experts % num_groups or (num_groups > 1 and num_experts < 2 * num_groups):
        raise fields.error("n_group", f"{num_experts} experts make no {num_groups} groups of two or more; {FIX}")
    return num_experts


def _check_enough(fields: Fields, moe: MoEConfig) -> None:
    within = moe.num_experts // moe.num_groups * moe.top_groups
    if moe.experts_per_token > within:
        raise fields.error(
            "num_experts_per_tok", f"{moe.experts_per_token} cannot be chosen among {within} experts; {FIX}"
        )
