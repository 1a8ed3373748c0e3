"""The families with mixtures of experts: LLaDA2.x on Ling-2, SDAR on Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from common.checkpoint.families.decoder import read_decoder
from common.checkpoint.families.dense import QWEN
from common.checkpoint.families.fields import FIX, MOST_LAYERS, Fields
from common.checkpoint.model_config import ModelConfig, MoEConfig

_MOST_EXPERTS = 2**14
_LARGEST_SCALING = 1e3
_LARGEST_ROUTING_BLOCK = 1024


_LLADA2 = {
    **QWEN, "num_key_value_heads": 0, "max_window_layers": 28, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
    "use_qk_norm": True, "use_bias": True, "use_qkv_bias": False, "norm_head": False, "partial_rotary_factor": 0.5,
    "num_experts": 16, "num_experts_per_tok": 2, "num_shared_experts": 0, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 0, "moe_router_enable_expert_bias": True,
}  # fmt: skip
_SDAR_MOE = {
    **QWEN, "num_key_value_heads": 4, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
}  # fmt: skip


def read_llada2_moe(fields: Fields) -> ModelConfig:
    """LLaDA2.0 and 2.1: a sigmoid router over groups, shared experts, half of each head rotated. 2.2: with
    `expert_capacity` tokens choose by blocks, and the keys of groups, which are still there, say nothing."""
    fields = fields.read_by(_LLADA2)
    for key, value in (
        ("score_function", "sigmoid"), ("router_dtype", "fp32"), ("use_qk_norm", True), ("use_rmsnorm", True),
        ("use_bias", False), ("use_qkv_bias", False), ("norm_head", False),
    ):  # fmt: skip
        fields.only(key, value)
    is_by_block = bool(fields.get("expert_capacity"))
    num_groups = 1 if is_by_block else fields.integer("n_group", at_most=_MOST_EXPERTS)
    experts_per_token = fields.integer("num_experts_per_tok", at_most=_MOST_EXPERTS)
    if experts_per_token > 1:
        fields.only("norm_topk_prob", True)  # the published code looks at their number alone
    moe = MoEConfig(
        num_experts=_divided(fields, num_groups),
        experts_per_token=experts_per_token,
        intermediate_size=fields.integer("moe_intermediate_size"),
        num_shared_experts=fields.integer("num_shared_experts", at_least=0, at_most=_MOST_EXPERTS, null=0),
        num_groups=num_groups,
        top_groups=1 if is_by_block else fields.integer("topk_group", at_most=num_groups),
        scoring="sigmoid",
        normalise=experts_per_token > 1,
        scaling=fields.number("routed_scaling_factor", at_least=0, at_most=_LARGEST_SCALING),
        first_dense=fields.integer("first_k_dense_replace", at_least=0, at_most=MOST_LAYERS),
        has_expert_bias=fields.flag("moe_router_enable_expert_bias"),
        capacity=_capacity(fields, experts_per_token) if is_by_block else 0,
        block_size=fields.integer("block_size", at_most=_LARGEST_ROUTING_BLOCK) if is_by_block else 0,
    )
    _check_enough(fields, moe)
    config = read_decoder(
        fields, "llada2_moe", shift=0, block_origin="zero", qk_norm=True, block_size_key="block_size",
        mask_text="<|mask|>", turn_end="<|role_end|>", moe=moe,
    )  # fmt: skip
    return replace(config, edit_ids=_edit_ids(fields, config))


def _capacity(fields: Fields, experts_per_token: int) -> int:
    most = fields.integer("num_experts", at_most=_MOST_EXPERTS)
    return fields.integer("expert_capacity", at_least=experts_per_token, at_most=most)


def _edit_ids(fields: Fields, config: ModelConfig) -> tuple[int, int] | None:
    keys = ("delete_token_id", "split_token_id")
    if all(fields.get(key) is None for key in keys):
        return None
    delete, split = (fields.token_id(key, fields.get(key), config.vocab_size) for key in keys)
    taken = (*config.stop_token_ids, config.mask_token_id)
    if delete == split or delete in taken or split in taken:
        raise fields.error(keys[0], f"{delete}, {split}, the mask and the end tokens are not all different; {FIX}")
    return delete, split


def read_sdar_moe(fields: Fields) -> ModelConfig:
    """Qwen3-MoE: a softmax router, no shared experts, every layer a mixture."""
    has_late_name = fields.has("num_local_experts")  # in files of late versions of transformers
    if has_late_name and fields.has("num_experts"):
        fields.only("num_local_experts", fields.get("num_experts"))
    fields = fields.read_by(_SDAR_MOE, {"num_experts": "num_local_experts"} if has_late_name else {})
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
