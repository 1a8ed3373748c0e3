"""The largest step that is captured: as many tokens as many requests need, but no more memory than is spared for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.checkpoint import ModelConfig, load_model_config
from lopa_cuda.assemble import MOST_CAPTURED_BYTES, MOST_CAPTURED_TOKENS, most_captured_tokens
from lopa_cuda.steps import CacheSizes


def most_tokens(config: ModelConfig, tp_size: int) -> int:
    kv_heads = config.kv_heads_of_rank(tp_size)
    sizes = CacheSizes(config.num_layers, 1, 1, kv_heads, config.head_size, torch.bfloat16)
    return most_captured_tokens(config, tp_size, sizes.bytes_per_position)


def held_bytes(model: str, num_tokens: int, tp_size: int) -> int:
    """Return the bytes of staged keys and values, and of gate and up, in bf16, of a model without experts."""
    config = load_model_config(model)
    kv = 2 * config.num_layers * config.kv_heads_of_rank(tp_size) * config.head_size
    return 2 * num_tokens * (kv + 2 * config.intermediate_size // tp_size)


def test_a_small_model_is_captured_up_to_the_most_tokens() -> None:
    assert most_tokens(load_model_config("models/demo"), 1) == MOST_CAPTURED_TOKENS


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_large_model_is_bound_by_memory(tp_size: int) -> None:
    model = "configs/models/llada_8b"
    num_tokens = most_tokens(load_model_config(model), tp_size)
    assert num_tokens < MOST_CAPTURED_TOKENS
    assert held_bytes(model, num_tokens, tp_size) <= MOST_CAPTURED_BYTES < held_bytes(model, num_tokens + 1, tp_size)


def test_routed_experts_count_as_often_as_a_token_goes_through_one() -> None:
    config = load_model_config("configs/models/llada2_flash")
    assert config.moe is not None
    twice = replace(config, moe=replace(config.moe, experts_per_token=2 * config.moe.experts_per_token))
    assert most_tokens(twice, 1) < most_tokens(config, 1)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("model", ["llada2_flash", "sdar_30b_a3b"])
def test_every_rank_has_room_for_the_results_of_all_experts(model: str, tp_size: int) -> None:
    config = load_model_config(f"configs/models/{model}")
    assert config.moe is not None
    kv = 2 * config.num_layers * config.kv_heads_of_rank(tp_size) * config.head_size
    results = config.moe.experts_per_token * config.hidden_size
    assert 2 * most_tokens(config, tp_size) * (kv + results) <= MOST_CAPTURED_BYTES
