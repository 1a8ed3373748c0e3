"""Steps of a chosen shape without a scheduler, and what a step must read and multiply at least."""

from __future__ import annotations

import numpy as np

from common.checkpoint import ModelConfig
from common.decoding import RowField, Sampling, StepPlan


def step_floors_ms(config: ModelConfig, floors: dict[str, float], num_tokens: int, tp_size: int) -> dict[str, float]:
    """Every weight read once as bf16, and every product of the layers and the head for every token."""
    num_weights = num_matrix_weights(config) / tp_size
    return {
        "weight_floor_ms": 2 * num_weights / floors["bytes_per_s"] * 1e3,
        "matrix_floor_ms": 2 * num_weights * num_tokens / floors["flops_per_s"] * 1e3,
    }


def num_matrix_weights(config: ModelConfig) -> int:
    """Weights of the linears, the head included; embeddings are only looked up."""
    query, key = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    layer = config.hidden_size * (2 * query + 2 * key + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def synthetic_plan(
    config: ModelConfig, *, num_rows: int, width: int, num_cached: int, read_share: float, seed: int = 0,
    block_size: int | None = None,
) -> StepPlan:  # fmt: skip
    """Branches of one request, all as wide, behind `num_cached` committed positions; nothing to commit.

    block_size: of block-causal attention; None: full attention inside the window.
    """
    rng = np.random.default_rng(seed)
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
        sampling=Sampling("neg_entropy", config.mask_token_id),
        commits_locally=block_size is not None,
    )
