"""Refuses what this engine cannot do, before anything is loaded."""

from __future__ import annotations

import os

from common.checkpoint import ModelConfig, MoEConfig
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.errors import ConfigError, MissingCapability
from common.processes import resolve_mesh
from lopa_ascend.kv import why_not_decoded
from lopa_ascend.load import HEAD_SIZE
from lopa_ascend.ops import require_triton
from lopa_ascend.variables import check_variables

GRAPH_MODES = ("npugraph_ex", "npugraph", "torchair", "eager")


def check(profile: DeviceProfile, run: RunConfig) -> None:
    """Refuse settings. Raises ConfigError or MissingCapability."""
    if run.decode.window_attention != "block_causal":
        raise ConfigError(
            f"engine lopa_ascend decodes with block-causal windows only, where branches need not exchange KV, and the "
            f"run has window_attention {run.decode.window_attention} (strategy {run.decode.strategy.name}): set "
            "decode.strategy to d2f and decode.window_attention to block_causal, or use a profile of engine lopa_cuda"
        )
    _check_decode(run.decode)
    allowed = ("bfloat16",) if profile.device == "npu" else ("bfloat16", "float32")
    if profile.dtype not in allowed:
        raise ConfigError(
            f"profile {profile.name}: paged attention of engine lopa_ascend has no {profile.dtype} on "
            f"{profile.device}: set dtype to {' or '.join(allowed)}"
        )
    if profile.quantization == "fp8":
        raise MissingCapability(f"profile {profile.name}: Ascend 910 has no fp8: set quantization to w8a8 or remove it")
    _check_kernels(profile)
    if profile.graph.mode not in GRAPH_MODES:
        raise MissingCapability(
            f"engine lopa_ascend has no graph.mode {profile.graph.mode}: set graph.mode to {' or '.join(GRAPH_MODES)}"
        )
    check_variables(profile, os.environ)


def _check_kernels(profile: DeviceProfile) -> None:
    if profile.kernels in ("auto", "npu"):
        return
    if profile.kernels != "triton" or profile.device != "npu":
        raise MissingCapability(
            f"profile {profile.name}: engine lopa_ascend has no kernels {profile.kernels} on {profile.device}: "
            "set kernels to auto"
        )
    if profile.graph.mode not in ("eager", "npugraph"):
        raise MissingCapability(
            f"profile {profile.name}: graph.mode {profile.graph.mode} compiles steps and does not know the kernels of "
            "Triton: set graph.mode to npugraph, or kernels to auto"
        )
    require_triton()


def check_model(profile: DeviceProfile, config: ModelConfig) -> None:
    """Refuse a checkpoint that this engine cannot compute. Raises ConfigError or MissingCapability."""
    if config.moe is not None:
        check_experts(profile, config.moe)
    if config.qk_norm and profile.kernels == "triton":
        raise MissingCapability(
            f"profile {profile.name}: kernels triton rotate and write KV in one kernel, which has no norm of heads as "
            f"{config.family} has: set kernels to auto"
        )
    if config.head_size > HEAD_SIZE:
        raise ConfigError(
            f"the model has heads of {config.head_size}, Ascend's paged attention takes up to {HEAD_SIZE}: "
            "use a profile of engine lopa_cuda"
        )


def _check_decode(decode: DecodeConfig) -> None:
    if (reason := why_not_decoded(decode)) is not None:
        raise ConfigError(reason)
    special = {
        "mask_probability": decode.mask_probability == "counted" and not decode.strategy.num_best,
        "penalty_lambda": decode.strategy.penalty > 0,
    }
    for name in (name for name, is_set in special.items() if is_set):
        raise ConfigError(
            f"{name}: engine lopa_ascend takes logits as they are: remove it, or use a profile of engine lopa_cuda"
        )


def check_experts(profile: DeviceProfile, moe: MoEConfig) -> None:
    """Refuse mixtures that the gating operators do not know: they choose by sigmoid in groups and weigh by shares, or
    by softmax among all. Raises ConfigError or MissingCapability."""
    is_sigmoid = moe.scoring == "sigmoid"
    is_known = moe.normalise if is_sigmoid else moe.num_groups == 1 and not moe.has_expert_bias
    if not is_known:
        raise MissingCapability(
            f"Ascend's gating operators have no {moe.scoring} with norm_topk_prob {moe.normalise}, "
            f"{moe.num_groups} groups and expert bias {moe.has_expert_bias}: use a profile of engine lopa_cuda"
        )
    if is_sigmoid and moe.num_experts // moe.num_groups <= 2 and profile.dtype != "float32":
        raise MissingCapability(
            f"the model has groups of {moe.num_experts // moe.num_groups} experts, npu_moe_gating_top_k takes those of "
            "more than two: use a profile of engine lopa_cuda"
        )
    if profile.quantization == "w8a8" and moe.intermediate_size % 64 and profile.dtype != "float32":
        raise MissingCapability(
            f"profile {profile.name}: experts have width {moe.intermediate_size}, in 8 bits npu_dequant_swiglu_quant "
            "takes multiples of 64 in groups: remove quantization"
        )
    tp_size = resolve_mesh(profile).tensor_parallel_size
    if moe.num_experts // tp_size < 2:
        raise ConfigError(
            f"profile {profile.name}: {moe.num_experts} experts over tensor_parallel_size {tp_size} leave a rank fewer "
            "than the two that npu_grouped_matmul takes: lower tensor_parallel_size"
        )
    if profile.graph.mode == "torchair":
        raise MissingCapability(
            f"profile {profile.name}: graph.mode torchair has not been tried with mixtures of experts: set graph.mode "
            "to npugraph"
        )
