"""Quantized linears in a plain model: swapped in from outside, close to the float model, kernels injected."""

from __future__ import annotations

import pytest
import torch
from test_quant_folders import Decoder, Linear, float_tensors, inputs
from torch import Tensor, nn

from quant import w8a8
from quant.calibration import Calibration, calibrate
from quant.errors import QuantizationError
from quant.linear import QuantizedLinear, QuantKernels, install_linears, swap_linears
from quant.scheme import Scheme, quantize_linear

NAMES = [f"layers.{layer}.{kind}_proj" for layer in range(2) for kind in ("qkv", "o", "gate_up", "down")]


def model() -> Decoder:
    return Decoder(float_tensors(dtype=torch.float32))


def calibration_of(decoder: nn.Module) -> Calibration:
    return calibrate(decoder, [lambda: decoder(inputs())])


@pytest.mark.parametrize("scheme, bound", [("w8a8_dynamic", 0.05), ("w8a8", 0.1), ("fp8", 0.1)])
def test_a_swapped_model_stays_close_to_the_float_one(scheme: Scheme, bound: float) -> None:
    decoder = model()
    calibration, exact = calibration_of(decoder), decoder(inputs())
    assert swap_linears(decoder, scheme, calibration=calibration) == NAMES
    assert all(isinstance(decoder.get_submodule(name), QuantizedLinear) for name in NAMES)
    error = (decoder(inputs()) - exact).norm() / exact.norm()
    assert 0 < error < bound


def test_excluded_linears_stay_float() -> None:
    decoder = model()
    swapped = swap_linears(decoder, "w8a8_dynamic", exclude=["layers.0.*", "*.down_proj"])
    assert swapped == [name for name in NAMES if name.startswith("layers.1") and not name.endswith("down_proj")]
    assert isinstance(decoder.get_submodule("layers.1.down_proj"), Linear)


def test_an_exclusion_that_names_nothing_is_refused() -> None:
    with pytest.raises(QuantizationError, match=r"'layers\.7\.\*' names no linear"):
        swap_linears(model(), "w8a8_dynamic", exclude=["layers.7.*"])


def test_static_needs_a_calibration_of_every_linear() -> None:
    decoder = model()
    with pytest.raises(QuantizationError, match="give a calibration"):
        swap_linears(decoder, "w8a8")
    partial = Calibration({"layers.0.qkv_proj": calibration_of(decoder).of("layers.0.qkv_proj")})
    with pytest.raises(QuantizationError, match=r"layers\.0\.o_proj was not calibrated"):
        swap_linears(decoder, "w8a8", calibration=partial)


def test_quantized_activations_go_in_as_floats_do() -> None:
    linear = QuantizedLinear(quantize_linear(torch.randn(6, 8), torch.randn(6), "w8a8_dynamic"), torch.bfloat16)
    x = torch.randn(2, 5, 8).bfloat16()
    y = linear(x)
    assert y.shape == (2, 5, 6) and y.dtype == torch.bfloat16
    assert torch.equal(y, linear(w8a8.quantize_per_token(x)))


@pytest.mark.parametrize("scheme", ["w8a8_dynamic", "w8a8", "fp8"])
def test_a_swapped_model_traces_without_graph_breaks(scheme: Scheme) -> None:
    decoder = model()
    swap_linears(decoder, scheme, calibration=calibration_of(decoder))
    compiled = torch.compile(decoder, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(inputs()), decoder(inputs()))


def test_kernels_get_the_operands_of_the_scheme() -> None:
    calls: list[tuple[torch.dtype, tuple[int, ...], bool, torch.dtype | None]] = []

    def matmul(
        x: Tensor, weight: Tensor, scale: Tensor, x_scale: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        calls.append((x.dtype, tuple(x.shape), x_scale is None, None if bias is None else bias.dtype))
        return w8a8.linear(x, weight, scale, x_scale, bias, out_dtype)

    for scheme in ("w8a8_dynamic", "w8a8"):
        decoder = model()
        swap_linears(decoder, scheme, calibration=calibration_of(decoder), kernels=QuantKernels(matmul=matmul))
        decoder.layers[0].qkv_proj(inputs())
        decoder.layers[0].o_proj(inputs())
    assert calls == [
        (torch.int8, (12, 32), False, torch.float32),
        (torch.int8, (12, 32), False, None),
        (torch.int8, (12, 32), True, torch.int32),
        (torch.int8, (12, 32), True, torch.int32),
    ]


def test_installed_linears_must_fit_the_model() -> None:
    tensors = {f"layers.0.o_proj.{k}": v for k, v in quantize_linear(torch.randn(32, 32), None, "w8a8_dynamic").items()}
    decoder = model()
    assert install_linears(decoder, tensors, torch.float32) == ["layers.0.o_proj"]
    assert isinstance(decoder.get_submodule("layers.0.o_proj"), QuantizedLinear)
    with pytest.raises(QuantizationError, match=r"layers\.0\.o_proj, the model does not"):
        install_linears(decoder, tensors, torch.float32)
    half = {**tensors, "layers.0.o_proj.weight": tensors["layers.0.o_proj.weight"][:, :16]}
    with pytest.raises(QuantizationError, match=r"\[32, 16\] in the quantized folder and \[32, 32\]"):
        install_linears(model(), half, torch.float32)
