"""Mixtures of experts in 8 bits: weights per output channel of each expert, rows per token.

A mixture is any module with `experts_gate_up` [E, 2X, D] and `experts_down` [E, D, X]; their scales stand beside them
as float32 buffers [E, O], None where the weights are floats. Routers and shared experts stay floats.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from quant.fp8 import FP8
from quant.linear import PLAIN_FP8, PLAIN_INT8
from quant.names import FLOATS
from quant.scheme import Scheme, quantize_linear

EXPERTS = ("experts_gate_up", "experts_down")


def swap_experts(model: nn.Module, scheme: Scheme) -> int:
    """Quantize the float experts of a model in place, one expert at a time; return the number of mixtures.

    scheme: "w8a8_dynamic" or "fp8". Scales are those of `quantize_linear`.
    """
    mixtures = [module for module in model.modules() if all(hasattr(module, name) for name in EXPERTS)]
    mixtures = [module for module in mixtures if module.get_parameter(EXPERTS[0]).dtype in FLOATS]
    for module in mixtures:
        for name in EXPERTS:
            experts = [quantize_linear(weight_OK, None, scheme) for weight_OK in module.get_parameter(name).data]
            values_EOK = torch.stack([expert["weight"] for expert in experts])
            setattr(module, name, nn.Parameter(values_EOK, requires_grad=False))
            setattr(module, f"{name}_scale", torch.stack([expert["weight_scale"] for expert in experts]))
    return len(mixtures)


def install_experts(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put `quant.folder.load_quantized`'s experts into a model, in place of its own."""
    for name, tensor in tensors.items():
        experts, _, leaf = name.rpartition(".")
        mixture, _, own = experts.rpartition(".")
        module = model.get_submodule(mixture)
        if leaf == "weight":
            setattr(module, own, nn.Parameter(tensor, requires_grad=False))
        else:
            setattr(module, f"{own}_scale", tensor)


def expert_linear(x_NK: Tensor, weight_OK: Tensor, scale_O: Tensor | None) -> Tensor:
    """Multiply rows by one expert's weight [N, O], in the dtype of x; by the rules of `w8a8` or `fp8` with a scale."""
    if scale_O is None:
        return functional.linear(x_NK, weight_OK)
    kernels = PLAIN_FP8 if weight_OK.dtype == FP8 else PLAIN_INT8
    values_NK, scale_N = kernels.quantize(x_NK)
    return kernels.matmul(values_NK, weight_OK, scale_O, scale_N, None, x_NK.dtype)
