"""What operations take and give beside tensors.

Letters: T tokens, D model width, N query heads, K KV heads, H head size, P pages.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

AttentionVersion = Literal[1, 2]


class AttentionForm(NamedTuple):
    """How attention is called: the operator's version, and the dimensions of the cache as it sees it.

    3: [P, page, K * H]. 4: [P, 1, page, H], the same bytes where a rank has one KV head, and not possible elsewhere.
    """

    version: AttentionVersion = 1
    view_dims: Literal[3, 4] = 3

    def __str__(self) -> str:
        return f"v{self.version} over {self.view_dims}-D pages"


# Until the self-test has measured forms on a device: what production engines call.
USUAL_ATTENTION = AttentionForm()


class Normed(NamedTuple):
    """hidden: the normed sum. residual: the sum itself, which the next residual add takes."""

    hidden: Tensor
    residual: Tensor


class Quantized(NamedTuple):
    """int8 [T, D] and what one unit of it is worth, float32 [T]."""

    values: Tensor
    scale_T: Tensor


class QuantizedNorm(NamedTuple):
    hidden: Quantized
    residual: Tensor


class HeadNorms(NamedTuple):
    """Weights [H] of the RMS norms over each query head and each key head."""

    query_H: Tensor
    key_H: Tensor
    epsilon: float


class Projections(NamedTuple):
    """query [T, N, H] and key [T, K, H] rotated, value [T, K, H]; contiguous, as attention and cache demand."""

    query: Tensor
    key: Tensor
    value: Tensor
