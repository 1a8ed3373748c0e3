"""Compare what a twin returns with what torch_npu's own meta kernel says the operator returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from sim.calls import Call, SimulationError

# The wheel has no meta kernel for these; nothing to compare with.
_META = "Meta"


def has_meta_kernel(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, _META))


def check(call: Call, result: Any) -> None:
    """Raises SimulationError where shapes or dtypes differ; the call itself may be refused by the meta kernel."""
    if not has_meta_kernel(call.name):
        return
    args, kwargs = call.mapped(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf)
    expected = tree_flatten(call.func(*args, **kwargs))[0]
    for index, (want, got) in enumerate(zip(expected, tree_flatten(result)[0], strict=True)):
        if isinstance(want, Tensor) and (want.shape, want.dtype) != (got.shape, got.dtype):
            raise SimulationError(
                f"{call.name} output {index}: the twin gives {got.dtype}{list(got.shape)}, "
                f"torch_npu's meta kernel {want.dtype}{list(want.shape)}"
            )
