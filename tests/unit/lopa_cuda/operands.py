"""Operands of kernels under test, and how far off their results are."""

from __future__ import annotations

import torch
from torch import Tensor


def random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())
