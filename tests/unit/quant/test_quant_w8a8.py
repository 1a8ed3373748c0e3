"""The W8A8 and fp8 arithmetic: exact where it says exact, bounded where it rounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quant import fp8, w8a8
from quant.scheme import StaticInput, quantize_linear

DREAM_MLP = 18944


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("left, right", [(-128, -128), (127, 127), (-128, 127)])
def test_accumulation_is_exact_at_the_longest_row_with_extreme_values(left: int, right: int) -> None:
    x = torch.full((3, DREAM_MLP), left, dtype=torch.int8)
    weight = torch.full((5, DREAM_MLP), right, dtype=torch.int8)
    weight[1, 0] += 1 if right < 127 else -1  # one unit in 3e8: lost in fp32
    acc = w8a8.int8_matmul(x, weight)
    assert acc.dtype == torch.int32
    assert acc[0, 0].item() == left * right * DREAM_MLP
    assert abs(acc[0, 1].item() - acc[0, 0].item()) == abs(left)


def test_both_ways_to_multiply_on_the_cpu_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-128, 128, (17, 301), dtype=torch.int8, generator=generator)
    weight = torch.randint(-128, 128, (23, 301), dtype=torch.int8, generator=generator)
    fast = w8a8.int8_matmul(x, weight)
    monkeypatch.setattr(w8a8, "_CPU_INT_MM_IS_EXACT", False)
    assert torch.equal(fast, w8a8.int8_matmul(x, weight))
    assert torch.equal(fast, (x.long() @ weight.long().t()).int())


def test_halves_round_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    values, scale = w8a8.quantize_per_token(x)
    assert scale.tolist() == [1.0]
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, -2]]
    static = w8a8.quantize_static(x, torch.tensor([1.0]), torch.tensor([1.0]))
    assert static.tolist() == [[127, 2, 2, 4, 0, 0, -2]]


@pytest.mark.parametrize("quantizer", [w8a8.quantize_per_token, fp8.quantize_per_token])
def test_a_row_of_zeros_has_values_and_scale_zero(quantizer: object) -> None:
    x = random_tensor(3, 8)
    x[1] = 0
    x[2] *= 1e-45  # below the least normal number: the scale underflows
    values, scale = quantizer(x)  # type: ignore[operator]
    assert scale[1].item() == 0 and not values[1].float().any()
    assert torch.isfinite(values.float()).all() and torch.isfinite(scale).all()


@pytest.mark.parametrize("quantizer", [w8a8.quantize_weight, fp8.quantize_weight])
def test_a_weight_row_of_zeros_has_a_usable_scale(quantizer: object) -> None:
    values, scale = quantizer(torch.zeros(2, 4))  # type: ignore[operator]
    assert scale.tolist() == [1.0, 1.0] and not values.float().any()


@settings(max_examples=50)
@given(st.integers(1, 9), st.integers(1, 33), st.floats(1e-6, 1e6), st.integers(0, 1000))
def test_quantized_values_are_within_half_a_step(num_rows: int, width: int, size: float, seed: int) -> None:
    x = random_tensor(num_rows, width, seed=seed) * size
    for values, scale in (w8a8.quantize_per_token(x), w8a8.quantize_weight(x)):
        error = (values.float() * scale[:, None] - x).abs()
        assert (error <= scale[:, None] * 0.50001).all()
        assert values.abs().max() <= 127


def test_output_is_rounded_once() -> None:
    acc, scale = torch.tensor([[300_000_007]], dtype=torch.int32), torch.tensor([3e-4])
    y = w8a8.dequantize(acc, scale, torch.tensor([0.017]), torch.tensor([0.25]), torch.bfloat16)
    exact = torch.tensor(300_000_007.0) * torch.tensor(3e-4) * torch.tensor(0.017) + 0.25
    assert y.item() == exact.to(torch.bfloat16).item()


def test_an_integer_bias_joins_the_accumulator_and_a_float_bias_the_result() -> None:
    acc, scale = torch.tensor([[10, 20]], dtype=torch.int32), torch.tensor([0.5, 0.25])
    by_integer = w8a8.dequantize(acc, scale, None, torch.tensor([4, -4], dtype=torch.int32), torch.float32)
    by_float = w8a8.dequantize(acc, scale, None, torch.tensor([2.0, -1.0]), torch.float32)
    assert by_integer.tolist() == by_float.tolist() == [[7.0, 4.0]]


def test_static_agrees_with_dynamic_and_with_float() -> None:
    x, weight, bias = random_tensor(32, 64), random_tensor(48, 64, seed=1), random_tensor(48, seed=2)
    low, high = x.min().item(), x.max().item()
    scale = torch.tensor([(high - low) / 255])
    static_input = StaticInput(scale, torch.round(-128 - low / scale))
    static = quantize_linear(weight, bias, "w8a8", static_input)
    x_q = w8a8.quantize_static(x, *static_input)
    y_static = w8a8.linear(x_q, static["weight"], static["deq_scale"], None, static["quant_bias"], torch.float32)
    dynamic = quantize_linear(weight, bias, "w8a8_dynamic")
    values, x_scale = w8a8.quantize_per_token(x)
    y_dynamic = w8a8.linear(values, dynamic["weight"], dynamic["weight_scale"], x_scale, dynamic["bias"], torch.float32)
    exact = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(static["weight"], dynamic["weight"])
    for y in (y_static, y_dynamic):
        assert (y - exact).norm() / exact.norm() < 0.02


def test_quant_bias_holds_bias_and_offset_exactly() -> None:
    weight = w8a8.quantize_weight(random_tensor(4, 6))
    input_scale, offset, bias = torch.tensor([0.125]), torch.tensor([-7.0]), random_tensor(4, seed=3)
    parameters = w8a8.static_parameters(weight, input_scale, offset, bias)
    units = torch.round(bias.double() / (0.125 * weight.scale).double()).long()
    assert parameters.quant_bias.tolist() == (units + 7 * weight.values.long().sum(dim=1)).tolist()


def test_a_bias_far_above_its_row_still_fits() -> None:
    weight, bias = random_tensor(3, 8), torch.tensor([5.0, 5.0, 0.0])
    weight[0], weight[1], weight[2] = 0.0, weight[1] * 1e-12, 0.0
    made = quantize_linear(weight, bias, "w8a8", StaticInput(torch.tensor([1e-3]), torch.tensor([0.0])))
    x_q = torch.zeros(1, 8, dtype=torch.int8)
    y = w8a8.linear(x_q, made["weight"], made["deq_scale"], None, made["quant_bias"], torch.float32)
    assert torch.allclose(y, bias[None], rtol=1e-6)


def test_folder_scales_survive_bfloat16_and_never_shrink() -> None:
    scale = w8a8.channel_scale(random_tensor(64, 32))
    rounded = w8a8.round_up_to_bfloat16(scale)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert (rounded >= scale).all() and (rounded <= scale * (1 + 2**-7)).all()
    assert torch.equal(w8a8.round_up_to_bfloat16(rounded), rounded)


def test_fp8_errors_are_those_of_three_mantissa_bits() -> None:
    x, weight = random_tensor(32, 256), random_tensor(48, 256, seed=1)
    quantized = fp8.quantize_weight(weight)
    restored = quantized.values.float() * quantized.scale[:, None]
    floor = quantized.scale[:, None] * 2**-10  # half a subnormal step
    assert ((restored - weight).abs() <= weight.abs() * 2**-4 + floor).all()
    values, scale = fp8.quantize_per_token(x)
    assert values.dtype == torch.float8_e4m3fn and values.float().abs().max().item() == fp8.FP8_MAX
    y = fp8.linear(values, quantized.values, quantized.scale, scale, None, torch.float32)
    exact = x @ weight.t()
    assert (y - exact).norm() / exact.norm() < 0.05
