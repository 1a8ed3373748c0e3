"""Steps of a chosen shape without a scheduler, and what a step must read and multiply at least."""

from __future__ import annotations

import numpy as np

from common.checkpoint import ModelConfig, MoEConfig
from common.decoding import RowField, Sampling, StepPlan


def step_floors_ms(
    config: ModelConfig, floors: dict[str, float], num_tokens: int, tp_size: int, num_experts_hit: float | None = None
) -> dict[str, float]:
    """Return the time to read every weight that the tokens need once as bf16, and the time for every product of the
    layers and the head for every token. num_experts_hit: of a layer, where it was counted; else each expert is as
    likely as any other."""
    num_read, num_multiplied = num_weights_read(config, num_tokens), num_matrix_weights(config)
    if num_experts_hit is not None:
        num_read = _num_weights(config, num_experts_hit)
    return {
        "weight_floor_ms": 2 * num_read / tp_size / floors["bytes_per_s"] * 1e3,
        "matrix_floor_ms": 2 * num_multiplied / tp_size * num_tokens / floors["flops_per_s"] * 1e3,
    }


def num_matrix_weights(config: ModelConfig) -> float:
    """Weights of the linears that a token is multiplied with; in a mixture of experts the router, the token's experts
    and the shared ones. The head is included; embeddings are only looked up."""
    return _num_weights(config, config.moe.experts_per_token if config.moe is not None else 0)


def num_weights_read(config: ModelConfig, num_tokens: int) -> float:
    """Weights of the linears that so many tokens need, if each of their experts is as likely as any other."""
    without_experts = _num_weights(config, 0)
    if config.moe is None:
        return without_experts
    experts = _num_weights(config, config.moe.num_experts) - without_experts
    return without_experts + experts * share_of_experts_hit(config.moe, num_tokens)


def share_of_experts_hit(moe: MoEConfig, num_tokens: int) -> float:
    """The part of all experts that at least one token goes to, if each is as likely as any other; those of a block that
    chooses together are among the experts that it admits."""
    if not moe.capacity:
        return float(1 - (1 - moe.experts_per_token / moe.num_experts) ** num_tokens)
    num_whole, rest = divmod(num_tokens, moe.block_size)
    missed = 1.0
    for count, num_blocks in ((moe.block_size, num_whole), (rest, 1)):
        of_block = moe.capacity / moe.num_experts * (1 - (1 - moe.experts_per_token / moe.capacity) ** count)
        missed *= (1 - of_block) ** num_blocks
    return float(1 - missed)


def _num_weights(config: ModelConfig, num_experts: float) -> float:
    """Weights of the linears with so many of a layer's experts."""
    width, moe = config.hidden_size, config.moe
    query, key = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    num_moe = sum(config.is_moe_layer(layer) for layer in range(config.num_layers))
    weights: float = config.num_layers * width * (2 * query + 2 * key) + config.vocab_size * width
    weights += (config.num_layers - num_moe) * 3 * width * config.intermediate_size
    if moe is not None:
        inner = (num_experts + moe.num_shared_experts) * moe.intermediate_size
        weights += num_moe * width * (3 * inner + moe.num_experts)
    return weights


def synthetic_plan(
    config: ModelConfig, *, num_rows: int, width: int, num_cached: int, read_share: float,
    block_size: int | None = None,
) -> StepPlan:  # fmt: skip
    """Make a step of branches of one request, all as wide, after `num_cached` committed positions; nothing is
    committed.

    block_size: that of block-causal attention; None: full attention inside the window.
    """
    rng = np.random.default_rng(0)
    end = num_cached + width
    is_read_W = np.zeros(width, dtype=np.bool_)
    is_read_W[rng.permutation(width)[: max(1, round(read_share * width))]] = True
    length = block_size or width
    block_end_W = (np.arange(width) // length + 1) * length
    token_T = rng.integers(0, config.vocab_size, num_rows * width)
    position_T = np.tile(np.arange(num_cached, end), num_rows)
    horizon_T = np.tile(np.minimum(end, num_cached + block_end_W), num_rows)
    per_row = 0, width, width, num_cached, num_cached, 0, 0, 0  # in the order of RowField
    row_fields_8R = np.tile(np.array(per_row)[:, None], (1, num_rows))
    row_fields_8R[RowField.FIRST] = np.arange(num_rows) * width
    return StepPlan(
        entries_3T=np.stack((token_T, position_T, horizon_T)),
        is_read_T=np.tile(is_read_W, num_rows),
        row_fields_8R=row_fields_8R,
        request_R=np.zeros(num_rows, dtype=np.int64),
        commits=(),
        sampling=Sampling("neg_entropy", config.mask_token_id or 0),  # any token does, where the folder names none
        commits_locally=block_size is not None,
    )
