"""Each twin computes the plain formula."""

from __future__ import annotations

import plain
import pytest
import torch
from plain import BF16_STEP, assert_close, assert_int8_close
from torch import Tensor

from lopa_ascend.ops import reference_ops

OPS = reference_ops()
EPSILON = 1e-6


@pytest.fixture
def draw() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def normal(draw: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=draw).to(dtype)


def int8(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=draw, dtype=torch.int8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm(draw: torch.Generator, dtype: torch.dtype) -> None:
    x, gamma = normal(draw, 16, 256, dtype=dtype), normal(draw, 256, dtype=dtype)
    step = BF16_STEP if dtype == torch.bfloat16 else 1e-6
    assert_close(OPS.rms_norm(x, gamma, EPSILON), plain.rms_norm(x, gamma, EPSILON), step, 1e-6)


def test_add_rms_norm_norms_the_rounded_sum(draw: torch.Generator) -> None:
    x, residual, gamma = normal(draw, 16, 256), normal(draw, 16, 256), normal(draw, 256)
    total = (x.double() + residual.double()).bfloat16()
    hidden, new_residual = OPS.add_rms_norm(x, residual, gamma, EPSILON)
    assert_close(hidden, plain.rms_norm(total, gamma, EPSILON), BF16_STEP, 1e-6)
    assert torch.equal(new_residual, total)


@pytest.mark.parametrize("is_smoothed", [False, True])
def test_add_rms_norm_dynamic_quant(draw: torch.Generator, is_smoothed: bool) -> None:
    x, residual, gamma = normal(draw, 16, 256), normal(draw, 16, 256), normal(draw, 256)
    smooth = normal(draw, 256).abs() + 0.5 if is_smoothed else None
    total = x.double() + residual.double()
    wanted = plain.rms_norm(total, gamma, EPSILON) * (1 if smooth is None else smooth.double())
    values, scale = plain.quantize(wanted)
    hidden, new_residual = OPS.add_rms_norm_dynamic_quant(x, residual, gamma, EPSILON, smooth)
    assert_int8_close(hidden.values, values)
    assert_close(hidden.scale_T, scale, 1e-5)
    assert_close(new_residual, total, BF16_STEP)


def test_dynamic_quant_keeps_a_row_of_zeros_finite(draw: torch.Generator) -> None:
    x = normal(draw, 32, 256)
    values, scale = plain.quantize(x)
    got = OPS.dynamic_quant(x)
    assert_int8_close(got.values, values)
    assert_close(got.scale_T, scale, 1e-6)
    x[3] = 0
    got = OPS.dynamic_quant(x)
    assert int(got.values[3].abs().max()) == 0
    assert bool(got.scale_T.isfinite().all())


def test_static_quant_multiplies_by_the_reciprocal_scale(draw: torch.Generator) -> None:
    x, scale, offset = normal(draw, 32, 256), torch.tensor([0.02]), torch.tensor([-7.0])
    wanted = torch.round(x.double() / 0.02 - 7).clamp(-128, 127)
    assert_int8_close(OPS.static_quant(x, 1 / scale, offset), wanted)


@pytest.mark.parametrize("bias_dtype", [None, torch.int32, torch.bfloat16, torch.float32])
def test_quant_matmul(draw: torch.Generator, bias_dtype: torch.dtype | None) -> None:
    x, weight = int8(draw, 32, 256), int8(draw, 256, 192)
    weight_scale, scale = torch.rand(192, generator=draw) * 1e-3, torch.rand(32, generator=draw) + 0.5
    bias = None if bias_dtype is None else (torch.randn(192, generator=draw) * 30).to(bias_dtype)
    accumulator = x.double() @ weight.double() + (bias if bias_dtype == torch.int32 else 0)
    wanted = accumulator * weight_scale.double() * scale.double()[:, None]
    if bias is not None and bias_dtype != torch.int32:
        wanted = wanted + bias.double()
    assert_close(OPS.quant_matmul(x, weight, weight_scale, scale_T=scale, bias_N=bias), wanted, BF16_STEP * 1.01, 1e-4)


def test_the_int32_accumulator_is_exact_beyond_2_to_the_24() -> None:
    x = torch.full((1, 18944), 127, dtype=torch.int8)
    accumulator = OPS.quant_matmul_int32(x, x.T.contiguous(), torch.ones(1))
    assert int(accumulator) == 127 * 127 * 18944


def test_the_exact_product_without_a_trusted_integer_kernel(
    draw: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lopa_ascend.ops.twins import quant

    x, weight = int8(draw, 4, 2500), int8(draw, 2500, 8)
    monkeypatch.setattr("quant.w8a8._CPU_INT_MM_IS_EXACT", False)
    assert torch.equal(quant.int8_matmul(x, weight).double(), x.double() @ weight.double())


def test_swiglu_gates_with_the_first_half(draw: torch.Generator) -> None:
    gate_up = normal(draw, 16, 512)
    assert_close(OPS.swiglu(gate_up), plain.swiglu(*gate_up.chunk(2, -1)), BF16_STEP * 1.01, 1e-6)


@pytest.mark.parametrize("is_smoothed", [False, True])
def test_dequant_swiglu_quant_gates_with_the_first_half(draw: torch.Generator, is_smoothed: bool) -> None:
    accumulator = torch.randint(-20000, 20000, (16, 512), generator=draw, dtype=torch.int32)
    weight_scale, scale = torch.rand(1, 512, generator=draw) * 1e-4, torch.rand(16, generator=draw) + 0.5
    smooth = torch.rand(1, 256, generator=draw) + 0.5 if is_smoothed else None
    gate, up = (accumulator.double() * weight_scale.double() * scale.double()[:, None]).chunk(2, -1)
    values, wanted_scale = plain.quantize(plain.swiglu(gate, up) * (1 if smooth is None else smooth.double()))
    got = OPS.dequant_swiglu_quant(accumulator, weight_scale, scale, smooth)
    assert_int8_close(got.values, values)
    assert_close(got.scale_T, wanted_scale, 1e-4)


def test_gate_and_up_in_one_operator_are_the_two_that_it_stands_for(draw: torch.Generator) -> None:
    x, weight = int8(draw, 16, 192), int8(draw, 192, 512)
    scales = torch.rand(512, generator=draw) * 1e-4, torch.rand(16, generator=draw) + 0.5
    got = OPS.quant_matmul_swiglu_quant(x, weight[None], *scales)
    wanted = OPS.dequant_swiglu_quant(OPS.quant_matmul_int32(x, weight, scales[0]), scales[0][None], scales[1])
    assert torch.equal(got.values, wanted.values) and torch.equal(got.scale_T, wanted.scale_T)


@pytest.mark.parametrize("num_tokens", [1, 24])
def test_split_and_rotate(draw: torch.Generator, num_tokens: int) -> None:
    angle = torch.arange(num_tokens)[:, None] * 1e6 ** (-torch.arange(0, 128, 2).double() / 128)
    cos, sin = (torch.cat([turn, turn], -1)[:, None].to(torch.bfloat16) for turn in (angle.cos(), angle.sin()))
    qkv = normal(draw, num_tokens, 9 * 128)
    query, key, value = qkv.clone().view(num_tokens, 9, 128).split([7, 1, 1], 1)
    got = OPS.split_and_rotate(qkv, cos, sin, num_heads=7)
    assert_close(got.query, plain.rotate(query, angle), BF16_STEP, 0.03)
    assert_close(got.key, plain.rotate(key, angle), BF16_STEP, 0.03)
    assert torch.equal(got.value, value)
    assert all(part.is_contiguous() for part in got)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_write_kv_touches_the_named_slots_only(
    draw: torch.Generator, num_kv_heads: int, slot_dtype: torch.dtype
) -> None:
    caches = [normal(draw, 4, 128, num_kv_heads, 128) for _ in range(2)]
    parts = [normal(draw, 40, num_kv_heads, 128) for _ in range(2)]
    slot = torch.randperm(4 * 128, generator=draw)[:40]
    wanted = [cache.clone() for cache in caches]
    for cache, part in zip(wanted, parts, strict=True):
        for token, where in enumerate(slot.tolist()):
            cache[where // 128, where % 128] = part[token]
    OPS.write_kv(*parts, *caches, slot.to(slot_dtype))
    assert all(torch.equal(cache, want) for cache, want in zip(caches, wanted, strict=True))


def test_to_nz_keeps_the_values_and_prefetch_nothing(draw: torch.Generator) -> None:
    weight = int8(draw, 64, 32)
    assert torch.equal(OPS.to_nz(weight), weight)
    OPS.prefetch(weight, weight, 1024)


def test_the_float32_lane_serves_small_float32_models(draw: torch.Generator) -> None:
    ops = reference_ops(hardware_types=False)
    x, gamma = normal(draw, 4, 32, dtype=torch.float32), torch.ones(32)
    values, scale = ops.add_rms_norm_dynamic_quant(x, x, gamma, EPSILON).hidden
    weight = int8(draw, 32, 3 * 16)
    qkv = ops.quant_matmul(values, weight, torch.ones(48), scale_T=scale, dtype=torch.float32)
    flat = torch.ones(4, 1, 16)
    assert ops.split_and_rotate(qkv, flat, 0 * flat, num_heads=1).query.dtype == torch.float32
    assert ops.dynamic_quant(x).values.dtype == torch.int8
