"""The folders of configs/models have as many parameters as their makers say, and cost a step what its tokens need."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from common.bench.estimate.operations import Kernel
from common.bench.estimate.record import record_step
from common.bench.estimate.setup import LAUNCHES, Setup
from common.checkpoint import load_model_config
from common.checkpoint.rules import checkpoint_shapes
from common.runtime import num_matrix_weights, num_weights_read, share_of_experts_hit, step_floors_ms

MODELS = Path(__file__).parents[3] / "configs" / "models"
BILLIONS = {
    "dream_7b": 7.6, "llada_8b": 8.0, "sdar_4b": 4.4, "sdar_8b": 8.2, "fast_dllm_v2_1_5b": 1.5, "fast_dllm_v2_7b": 7.6,
    "llada2_mini": 16.3, "llada2_flash": 102.9, "stable_diffcoder_8b": 8.3,
    "sdar_30b_a3b": 30.5, "llada2_2_mini": 16.3, "llada2_2_flash": 102.9,
}  # fmt: skip
ACTIVE_BILLIONS = {
    "llada2_mini": 1.4,
    "llada2_flash": 6.1,
    "sdar_30b_a3b": 3.3,
    "llada2_2_mini": 1.4,
    "llada2_2_flash": 6.1,
}  # with the embeddings


@pytest.mark.parametrize("name", sorted(path.name for path in MODELS.iterdir()))
def test_a_published_model_has_its_number_of_parameters(name: str) -> None:
    config = load_model_config(MODELS / name)
    total = sum(prod(shape) for shape in checkpoint_shapes(config).values())
    assert total / 1e9 == pytest.approx(BILLIONS[name], abs=0.051)
    active = (num_matrix_weights(config) + config.vocab_size * config.hidden_size) / 1e9
    if not config.tie_word_embeddings:
        assert active == pytest.approx(ACTIVE_BILLIONS.get(name, BILLIONS[name]), abs=0.06)


def test_few_tokens_read_the_experts_that_they_hit() -> None:
    config = load_model_config(MODELS / "llada2_mini")
    assert config.moe is not None
    assert share_of_experts_hit(config.moe, 1) == pytest.approx(8 / 256)
    assert num_weights_read(config, 1) == pytest.approx(num_matrix_weights(config))
    assert num_weights_read(config, 1) < num_weights_read(config, 64) < num_weights_read(config, 4096)
    by_block = load_model_config(MODELS / "llada2_2_mini").moe
    assert by_block is not None
    assert share_of_experts_hit(by_block, 1) == pytest.approx(8 / 256)
    assert share_of_experts_hit(by_block, 32) < 48 / 256 < share_of_experts_hit(config.moe, 32)
    assert share_of_experts_hit(by_block, 32) < share_of_experts_hit(by_block, 64) < 2 * 48 / 256
    dense = load_model_config(MODELS / "sdar_8b")
    assert num_weights_read(dense, 1) == num_weights_read(dense, 4096) == num_matrix_weights(dense)
    floors = step_floors_ms(config, {"bytes_per_s": 4e12, "flops_per_s": 8e14}, num_tokens=64, tp_size=2)
    assert floors["weight_floor_ms"] == pytest.approx(num_weights_read(config, 64) / 4e12 * 1e3)
    assert floors["matrix_floor_ms"] == pytest.approx(64 * num_matrix_weights(config) / 8e14 * 1e3)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", ["llada2_mini", "llada_8b", "sdar_4b", "sdar_30b_a3b"])
def test_an_estimate_counts_the_same_weights_and_products(name: str, tp: int) -> None:
    config = load_model_config(MODELS / name)
    setup = Setup(
        model=config, launches=LAUNCHES["lopa_cuda"], dtype="bfloat16", linear_dtype="bfloat16", tp=tp, bp=1,
        num_rows=2, num_requests=1, window=32, prefix=64, block_size=32, read_share=1.0, tokens_per_step=4.0,
        is_block_causal=False,
    )  # fmt: skip
    kernels = [operation for operation in record_step(setup) if isinstance(operation, Kernel)]
    router = 0  # on every rank, in float32
    if config.moe is not None:
        router = (config.num_layers - config.moe.first_dense) * config.moe.num_experts * config.hidden_size
    read, multiplied = num_weights_read(config, 64) - router, num_matrix_weights(config) - router
    assert sum(kernel.weight_bytes for kernel in kernels) == pytest.approx(2 * read / tp + 4 * router)
    flops = sum(kernel.flops for kernel in kernels if kernel.kind == "linear")
    assert flops == pytest.approx(2 * 64 * (multiplied / tp + router))
