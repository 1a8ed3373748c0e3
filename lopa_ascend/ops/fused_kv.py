"""Split, rotation and KV write of a layer as one operator: a Triton-Ascend kernel where `kernels: triton` asks for it.

An operator of its own, so that what dispatches operators sees one call. Its twin is what `Ops` does without it: the
split and rotation, then the KV write.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from common.errors import MissingCapability

# Programs of one launch, each of a token: docs/en/migration_guide/migrate_from_gpu.md of triton-lang/triton-ascend.
MOST_TOKENS = 2**16 - 1

_LIBRARY = torch.library.Library("lopa", "FRAGMENT")
_LIBRARY.define(
    "rotate_and_write(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, Tensor slot, "
    "int num_heads) -> Tensor"
)


def require_triton() -> None:
    """Raise MissingCapability where Triton-Ascend is missing."""
    if find_spec("triton") is None:
        raise MissingCapability(
            "kernels triton: Triton-Ascend is not installed: pip install triton-ascend, or set kernels to auto"
        )


def rotate_and_write(
    qkv_TE: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, key_cache: Tensor, value_cache: Tensor, slot_T: Tensor,
    num_heads: int,
) -> Tensor:  # fmt: skip
    """lopa_ascend.kernels.rotate_and_write on npu tensors."""
    query_TNH: Tensor = torch.ops.lopa.rotate_and_write(
        qkv_TE, cos_T1H, sin_T1H, key_cache, value_cache, slot_T, num_heads
    )
    return query_TNH


def _launch(*given: Tensor | int) -> Tensor:
    query_TNH: Tensor = import_module("lopa_ascend.kernels").rotate_and_write(*given)
    return query_TNH


@torch.library.register_fake("lopa::rotate_and_write", lib=_LIBRARY)
def _shape(qkv_TE: Tensor, cos_T1H: Tensor, *others: Tensor | int) -> Tensor:
    return qkv_TE.new_empty((qkv_TE.shape[0], int(others[-1]), cos_T1H.shape[-1]))


_LIBRARY.impl("rotate_and_write", _launch, "PrivateUse1")
