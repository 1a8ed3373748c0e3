"""Textbook float64 formulas that the twins are compared with: no blocking, no paging, no int8 tricks."""

from __future__ import annotations

import torch
from torch import Tensor

BF16_STEP = 2.0**-8  # half a unit in the last place, relative


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma.double()


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric per row: int8 values, scale."""
    scale = x.double().abs().amax(-1) / 127
    return torch.round(x.double() / scale[:, None]), scale


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate.double() / (1 + torch.exp(-gate.double())) * up.double()


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Each pair (i, i + H/2) of x [T, N, H] turned by angle [T, H/2]."""
    left, right = x.double().chunk(2, -1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def attention(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """query [T, N, H], keys and values [L, K, H], hidden [T, L] bool. Weights are rounded to the query's dtype."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("tnh,lnh->ntl", query.double(), keys) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    attended = torch.einsum("ntl,lnh->tnh", weights.to(query.dtype).double(), values)
    return attended / weights.sum(-1).T[..., None]


def assert_close(got: Tensor, want: Tensor, relative: float = 0.0, absolute: float = 0.0) -> None:
    torch.testing.assert_close(got.double().cpu(), want.double(), rtol=relative, atol=absolute)


def assert_int8_close(got: Tensor, want: Tensor, share: float = 0.002) -> None:
    """Equal but for rounding ties: off by one, rarely."""
    difference = (got.cpu().int() - want.int()).abs()
    assert int(difference.max()) <= 1
    assert float((difference > 0).float().mean()) <= share
