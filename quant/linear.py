"""Quantized linears, swapped into a plain model from outside.

A linear of the model is any module named qkv_proj, o_proj, gate_up_proj or down_proj that has a `weight` [N, K] and
perhaps a `bias` [N]. The matmul and the quantizers are injected: plain PyTorch here, kernels in the engines. What a
row-parallel linear's ranks must sum stays with the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from quant import fp8, w8a8
from quant.calibration import Calibration
from quant.errors import QuantizationError
from quant.names import find_linears, unmatched
from quant.scheme import Scheme, StaticInput, quantize_linear
from quant.w8a8 import QuantizedActivation

# (x [T, K], weight, weight_scale [N], x_scale [T] or None, bias [N] or None, out dtype) -> [T, N]; see w8a8.linear
Matmul = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class QuantKernels:
    """The matmul and quantizers of an engine. Each follows its plain counterpart in `w8a8` or `fp8`."""

    matmul: Matmul = w8a8.linear
    quantize: Callable[[Tensor], QuantizedActivation] = w8a8.quantize_per_token
    quantize_static: Callable[[Tensor, Tensor, Tensor], Tensor] = w8a8.quantize_static


PLAIN_INT8 = QuantKernels()
PLAIN_FP8 = QuantKernels(matmul=fp8.linear, quantize=fp8.quantize_per_token)

_BUFFERS = ("weight", "weight_scale", "bias", "input_scale", "input_offset", "deq_scale", "quant_bias")


class QuantizedLinear(nn.Module):
    """y = x @ weight.T + bias with int8 or fp8 operands. Buffers are named as in checkpoints; what it lacks is None.

    Dynamic: weight, weight_scale, bias. Static: weight, weight_scale, deq_scale, quant_bias, input_scale, input_offset.
    `weight` goes to the matmul as it is, so an engine may lay it out anew after load. Move the module with
    `.to(device)` only: a dtype would change the scales.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    input_scale: Tensor | None
    input_offset: Tensor | None
    deq_scale: Tensor | None
    quant_bias: Tensor | None

    def __init__(
        self, tensors: Mapping[str, Tensor], out_dtype: torch.dtype, kernels: QuantKernels = PLAIN_INT8
    ) -> None:
        """Take `tensors` by suffix, from `scheme.quantize_linear` or `folder.load_quantized`.

        `out_dtype` is what activations that come in quantized go out as.
        """
        super().__init__()
        self.out_dtype = out_dtype
        self.kernels = kernels
        for suffix in _BUFFERS:
            self.register_buffer(suffix, tensors.get(suffix))
        assert tensors.keys() <= set(_BUFFERS), "a tensor of the linear is not known"

    @property
    def is_static(self) -> bool:
        return self.input_scale is not None

    def forward(self, x: Tensor | QuantizedActivation) -> Tensor:
        """x: float [..., K], or already quantized per token (dynamic linears only). Floats come out in their dtype."""
        if isinstance(x, QuantizedActivation):
            assert not self.is_static, "a static linear quantizes its input itself"
            return self._multiply(x.values, x.scale, self.out_dtype)
        if self.input_scale is not None and self.input_offset is not None:
            return self._multiply(self.kernels.quantize_static(x, self.input_scale, self.input_offset), None, x.dtype)
        values, scale = self.kernels.quantize(x)
        return self._multiply(values, scale, x.dtype)

    def _multiply(self, values: Tensor, scale: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        x_TK = values.reshape(-1, values.shape[-1])
        scale_T = None if scale is None else scale.reshape(-1)
        weight_scale_N, bias_N = (
            (self.weight_scale, self.bias) if self.deq_scale is None else (self.deq_scale, self.quant_bias)
        )
        y_TN = self.kernels.matmul(x_TK, self.weight, weight_scale_N, scale_T, bias_N, out_dtype)
        return y_TN.reshape(*values.shape[:-1], y_TN.shape[-1])


def swap_linears(
    model: nn.Module,
    scheme: Scheme,
    exclude: Sequence[str] = (),
    calibration: Calibration | None = None,
    kernels: QuantKernels | None = None,
) -> list[str]:
    """Quantize a float model's linears in place, one at a time; returns their names.

    `exclude`: fnmatch patterns on module names, e.g. "layers.0.*"; `calibration` is needed for the static scheme
    "w8a8". Raises QuantizationError for a pattern that names nothing and for a linear that was not calibrated.
    """
    names = [name for name, _ in find_linears(model)]
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise QuantizationError(unmatched(pattern))
    chosen = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in exclude)]
    for name in chosen:
        static_input = calibration.of(name).static_input() if calibration and scheme == "w8a8" else None
        swap_linear(model, name, scheme, static_input, kernels)
    return chosen


def swap_linear(
    model: nn.Module, name: str, scheme: Scheme, static_input: StaticInput | None = None,
    kernels: QuantKernels | None = None,
) -> None:  # fmt: skip
    """Quantize one float linear in place, by its module name."""
    weight, bias = _float_tensors(model.get_submodule(name))
    tensors = quantize_linear(weight, bias, scheme, static_input)
    default = PLAIN_FP8 if scheme == "fp8" else PLAIN_INT8
    _replace(model, name, QuantizedLinear(tensors, weight.dtype, kernels or default))


def install_linears(
    model: nn.Module, tensors: Mapping[str, Tensor], out_dtype: torch.dtype, kernels: QuantKernels = PLAIN_INT8
) -> list[str]:
    """Put `folder.load_quantized`'s linears into a model, in place of its own; returns their names.

    Raises QuantizationError if the model has no such linear or one of another shape.
    """
    grouped: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        grouped.setdefault(module, {})[suffix] = tensor
    floats = dict(find_linears(model))
    for name, own in grouped.items():
        if name not in floats:
            raise QuantizationError(f"the quantized folder has {name}, the model does not: it is of another model")
        shape = _float_tensors(floats[name])[0].shape
        if own["weight"].shape != shape:
            raise QuantizationError(
                f"{name}.weight is {list(own['weight'].shape)} in the quantized folder and {list(shape)} in the model: "
                "load both with the same tp_rank and tensor_parallel_size"
            )
        _replace(model, name, QuantizedLinear(own, out_dtype, kernels))
    return list(grouped)


def _float_tensors(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = linear.weight, getattr(linear, "bias", None)
    assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
    return weight.detach(), None if bias is None else bias.detach()


def _replace(model: nn.Module, name: str, linear: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, linear)
