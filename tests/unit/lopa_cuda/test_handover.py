"""What the layers leave for the head, taken by an index."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.model import Activation
from lopa_cuda.steps import Handover
from quant.w8a8 import QuantizedActivation, quantize_per_token

MOST = 8


def copy_rows(parts: list[Tensor], to: list[Tensor], index_M: Tensor | None = None) -> None:
    for part, other in zip(parts, to, strict=True):
        other.copy_(part if index_M is None else part[index_M])


def same(x: Activation) -> Activation:
    return x


@pytest.mark.parametrize("kind", [same, quantize_per_token])
def test_a_captured_pass_leaves_its_values_where_the_next_one_does(kind: Callable[[Tensor], Activation]) -> None:
    handover = Handover(copy_rows, MOST)
    index = torch.tensor([2, 0, 0])
    for num_tokens in (MOST, 5):
        attended, residual = torch.randn(num_tokens, 6), torch.randn(num_tokens, 4)
        handover.leave(kind(attended), residual, is_captured=True)
        for is_captured in (True, False):  # also a head that is not captured takes them from there
            taken, taken_residual = handover.take(index, is_captured=is_captured)
            assert torch.equal(taken_residual, residual[index])
            for part, whole in zip(parts_of(taken), parts_of(kind(attended)), strict=True):
                assert torch.equal(part, whole[index])


def test_a_pass_that_is_not_captured_leaves_its_own() -> None:
    handover = Handover(copy_rows, MOST)
    kept, other = torch.randn(5, 4), torch.randn(3 * MOST, 4)
    handover.leave(kept, kept, is_captured=True)
    handover.leave(other, other, is_captured=False)
    last = torch.tensor([len(other) - 1])
    assert torch.equal(handover.take(last, is_captured=False)[1], other[last])
    handover.use_captured()
    assert torch.equal(handover.take(last - last, is_captured=False)[1], kept[:1])


def parts_of(activation: Activation) -> tuple[Tensor, ...]:
    return tuple(activation) if isinstance(activation, QuantizedActivation) else (activation,)
