"""What only some families have, on a GPU: experts, norms of heads and partial rotation, at published sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.checkpoint import MoEConfig, load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.config.profile import GraphConfig
from common.decoding import Predictions
from common.model import MoE, QKNorm, Routing, choose_experts, mixture, rms_norm, rotary_table, rotate
from common.model import route as plain_route
from common.runtime import synthetic_plan
from graphs.cuda import CudaCapture
from lopa_cuda.assemble import assemble
from quant.experts import swap_experts
from quant.scheme import Scheme

pytestmark = pytest.mark.cuda
if torch.cuda.is_available():
    pytest.importorskip("triton", reason="the kernels need Triton")
    from lopa_cuda import kernels

MODELS = Path(__file__).parents[2] / "configs" / "models"
FEW_LAYERS = {
    "llada_8b": "n_layers", "sdar_4b": "num_hidden_layers", "llada2_mini": "num_hidden_layers",
    "fast_dllm_v2_1_5b": "num_hidden_layers",
}  # fmt: skip


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def relative_error(value: Tensor, reference: Tensor) -> float:
    assert value.isfinite().all(), "every element must be written and finite"
    return float((value.double() - reference.double()).norm() / reference.double().norm())


def random_moe(config: MoEConfig, width: int, tp_rank: int = 0, tp_size: int = 1) -> MoE:
    moe = MoE(config, width, tp_rank, tp_size)
    for name, parameter in moe.named_parameters():
        is_float32 = name in ("router", "expert_bias")
        drawn = torch.randn(parameter.shape, device="cuda") * parameter.shape[-1] ** -0.5
        parameter.data = drawn if is_float32 else drawn.bfloat16()
    return moe


def mixed_experts(x: Tensor, routing: Routing, moe: MoE, shared: Tensor | None = None) -> Tensor:
    return kernels.mix_experts(kernels.expert_input(x, moe), routing, kernels.deal_pairs(routing, moe), moe, shared)


def mini() -> tuple[MoEConfig, int]:
    config = load_model_config(MODELS / "llada2_mini")
    assert config.moe is not None
    return config.moe, config.hidden_size


@pytest.mark.parametrize("num_tokens", [1, 33, 256, 2000])
@pytest.mark.parametrize("tp_size", [1, 4])
def test_experts_mix_as_the_plain_version(num_tokens: int, tp_size: int) -> None:
    config, width = mini()
    moe, x = random_moe(config, width, tp_size - 1, tp_size), random(num_tokens, width)
    logits = kernels.router_logits(x, moe.router)
    routing, expected = kernels.route(logits, moe.expert_bias, config), plain_route(x, moe)
    assert (routing.expert_TC == expected.expert_TC).float().mean() > 0.999  # products may be summed in another order
    shared = random(num_tokens, width)
    mixed = mixed_experts(x, routing, moe, shared)
    moe.shared_gate_up_proj = moe.shared_down_proj = None
    assert relative_error(mixed, mixture(x, moe).float() + shared.float()) < 2e-2


@pytest.mark.parametrize("num_tokens", [1, 33, 512, 2000])
@pytest.mark.parametrize("scheme", ["w8a8_dynamic", "fp8"])
def test_experts_in_8_bits_mix_as_the_plain_version(num_tokens: int, scheme: Scheme) -> None:
    """Scales of channels span two orders, so that one read at a wrong place shows."""
    config, width = mini()
    moe, x = random_moe(replace(config, num_shared_experts=0), width), random(num_tokens, width)
    for weight in (moe.experts_gate_up, moe.experts_down):
        weight.data *= torch.logspace(-1, 1, weight.shape[1], device="cuda")[:, None].bfloat16()
    swap_experts(moe, scheme)
    routing = plain_route(x, moe)
    mixed = mixed_experts(x, routing._replace(expert_TC=routing.expert_TC.int()), moe)
    assert relative_error(mixed, mixture(x, moe)) < 2e-2


def random_logits(num_tokens: int, num_experts: int) -> Tensor:
    """Scores whose differences, and those less 0.001, are 1e-5 or more, but for the first two experts', which tie."""
    draws = [torch.randperm(num_experts, device="cuda") for _ in range(num_tokens)]
    logits = (torch.stack(draws) / num_experts * 8 - 4).float()
    logits[:, 1] = logits[:, 0]
    return logits


@pytest.mark.parametrize("num_tokens", [1, 32, 64, 70, 2048])
@pytest.mark.parametrize(("capacity", "block_size"), [(48, 32), (9, 16), (256, 32)])
def test_blocks_admit_the_experts_that_the_plain_version_does(num_tokens: int, capacity: int, block_size: int) -> None:
    config, _ = mini()
    config = replace(config, num_groups=1, top_groups=1, capacity=capacity, block_size=block_size)
    logits = random_logits(num_tokens, config.num_experts)
    bias = 1e-3 * torch.randint(0, 2, (config.num_experts,), device="cuda")
    bias[1] = bias[0]
    expected, found = choose_experts(logits, bias, config), kernels.route(logits[None], bias, config)
    assert torch.equal(found.expert_TC.long(), expected.expert_TC)
    torch.testing.assert_close(found.weight_TC, expected.weight_TC, rtol=1e-5, atol=1e-7)


def test_a_captured_mixture_follows_its_input() -> None:
    config, width = mini()
    moe, x = random_moe(config, width), random(64, width)

    def mix() -> Tensor:
        routing = kernels.route(kernels.router_logits(x, moe.router), moe.expert_bias, config)
        return mixed_experts(x, routing, moe)

    mix()
    held: dict[str, Tensor] = {}
    replay = CudaCapture()(lambda: held.update(mixed=mix()))
    for _ in range(3):
        x.copy_(random(64, width))
        replay()
        assert torch.equal(held["mixed"], mix())


@pytest.mark.parametrize("rotary_size", [64, 128])
@pytest.mark.parametrize("num_tokens", [1, 64, 300])
def test_heads_are_normed_and_rotated_in_part(rotary_size: int, num_tokens: int) -> None:
    heads, kv_heads, size = 32, 4, 128
    qkv, norm = random(num_tokens, (heads + 2 * kv_heads) * size), QKNorm(size, 1e-6)
    norm.q_weight.data, norm.k_weight.data = random(size), random(size)
    table = rotary_table(2048, rotary_size, 6e5, torch.device("cuda"))
    position = torch.randint(0, 2048, (num_tokens,), device="cuda")
    window = torch.zeros(2, num_tokens, kv_heads, size, device="cuda", dtype=torch.bfloat16)
    query = kernels.rope_prewrite(qkv, position, table, window, num_heads=heads, qk_norm=norm)
    q, k, v = qkv.view(num_tokens, -1, size).split((heads, kv_heads, kv_heads), dim=1)
    expected_q = rotate(rms_norm(q, norm.q_weight, norm.eps), table[position])
    expected_k = rotate(rms_norm(k, norm.k_weight, norm.eps), table[position])
    assert relative_error(query, expected_q) < 1e-2
    assert relative_error(window[0], expected_k) < 1e-2 and torch.equal(window[1], v)


def few_layers(folder: Path, name: str) -> Path:
    """A model of two layers of a published size."""
    tree = json.loads((MODELS / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**tree, FEW_LAYERS[name]: 2}))
    return folder


@pytest.mark.parametrize("name", FEW_LAYERS)
def test_fused_kernels_predict_what_plain_operators_do(tmp_path: Path, name: str) -> None:
    plain, eager, fused = (
        predictions(few_layers(tmp_path, name), kernels=kernels, mode=mode)[0]
        for kernels, mode in (("torch", "eager"), ("triton", "eager"), ("triton", "cuda_graph"))
    )
    for found in (eager, fused):
        np.testing.assert_allclose(found.confidence_T, plain.confidence_T, atol=0.05)
        assert (found.token_T == plain.token_T).mean() > 0.7


@pytest.mark.parametrize("mode", ["eager", "cuda_graph"])
@pytest.mark.parametrize("quantization", [None, "w8a8"])
def test_experts_beside_shared_ones_give_the_same_each_time(tmp_path: Path, quantization: Any, mode: Any) -> None:
    """Both run on two streams: a race would change some passes."""
    model = few_layers(tmp_path, "llada2_mini")
    first, *again = predictions(model, num_passes=30, kernels="triton", mode=mode, quantization=quantization)
    for found in again:
        np.testing.assert_array_equal(found.confidence_T, first.confidence_T)
        np.testing.assert_array_equal(found.token_T, first.token_T)


def predictions(
    model: Path, num_passes: int = 1, *, kernels: Any, mode: Any, quantization: Any = None
) -> list[Predictions]:
    profile = DeviceProfile(
        name="test", engine="lopa_cuda", device="cuda", max_model_len=512, kernels=kernels,
        graph=GraphConfig(mode=mode), quantization=quantization,
    )  # fmt: skip
    decode = DecodeConfig(num_lookahead=3, block_size=32, max_new_tokens=64)
    engine = assemble(profile, RunConfig(model=str(model), load_format="dummy", max_num_requests=1, decode=decode))
    plan = synthetic_plan(load_model_config(model), num_rows=2, width=48, num_cached=0, read_share=1.0)
    return [Predictions(engine.forward(plan).values_3T.copy()) for _ in range(num_passes)]
