"""Calibration: ranges of what really went into each linear, and static parameters that cover them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quant_folders import HIDDEN, Decoder, float_tensors, inputs
from torch import nn

from quant import w8a8
from quant.calibration import ActivationRange, calibrate
from quant.calibration.calibrate import Observer
from quant.errors import QuantizationError


def model() -> Decoder:
    return Decoder(float_tensors(dtype=torch.float32))


def test_every_linear_is_observed_over_all_runs() -> None:
    decoder = model()
    runs = [lambda seed=seed: decoder(inputs(seed=seed)) for seed in range(3)]
    calibration = calibrate(decoder, runs, num_samples=10)
    assert sorted(calibration.ranges) == sorted(
        f"layers.{layer}.{kind}_proj" for layer in range(2) for kind in ("qkv", "o", "gate_up", "down")
    )
    first = calibration.of("layers.0.qkv_proj")
    norm = torch.rsqrt(torch.stack([inputs(seed=seed) for seed in range(3)]).square().mean(-1, keepdim=True) + 1e-6)
    seen = torch.stack([inputs(seed=seed) for seed in range(3)]) * norm * decoder.layers[0].input_norm
    assert torch.equal(first.maximum, seen.amax(dim=(0, 1))) and torch.equal(first.minimum, seen.amin(dim=(0, 1)))
    assert first.samples is not None and first.samples.shape == (10, HIDDEN)


def test_hooks_are_gone_afterwards_even_when_a_run_fails() -> None:
    decoder = model()
    calibrate(decoder, [lambda: decoder(inputs())])
    with pytest.raises(ZeroDivisionError):
        calibrate(decoder, [lambda: 1 // 0])
    assert not any(module._forward_pre_hooks for module in decoder.modules())


def test_the_result_does_not_depend_on_how_the_rows_are_split() -> None:
    x = torch.cat([inputs(40), 30 * inputs(2, seed=1)])
    whole, parts = Observer(0), Observer(0)
    whole.update(x)
    for rows in reversed(x.split(9)):
        parts.update(rows)
    one, other = whole.result(), parts.result()
    assert one is not None and other is not None
    assert torch.equal(one.minimum, other.minimum) and torch.equal(one.maximum, other.maximum)


@settings(max_examples=60)
@given(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4))
def test_static_codes_cover_the_range_and_keep_zero(low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    static_input = ActivationRange(torch.tensor([low]), torch.tensor([high])).static_input()
    x = torch.tensor([[low, high, 0.0]])
    values = w8a8.quantize_static(x, *static_input)
    restored = (values.float() - static_input.offset) * static_input.scale
    assert restored[0, 2].item() == 0
    assert ((restored - x).abs() <= static_input.scale * 1.01).all()
    assert torch.equal(static_input.scale, static_input.scale.bfloat16().float())


def test_calibrating_nothing_is_refused() -> None:
    decoder = model()
    with pytest.raises(QuantizationError, match="no float qkv_proj"):
        calibrate(nn.Sequential(nn.Linear(2, 2)), [])
    with pytest.raises(QuantizationError, match=r"no calibration run reached layers\.0\.down_proj"):
        calibrate(decoder, [])
    with pytest.raises(QuantizationError, match=r"layers\.0\.qkv_proj: an activation is not finite"):
        calibrate(decoder, [lambda: decoder(inputs() * torch.inf)])
