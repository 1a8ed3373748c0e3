"""Pulls a weight into L2 on a second stream, beside what the first one does next.

Both are operators of their own, so that a graph compiler takes each for one node and leaves the streams to what runs in
it; a capture then records the second stream, which is why it has to be joined again. In a GE graph there are no streams
of ours: the first becomes the node that npu_prefetch becomes, after a control edge, the second nothing.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("lopa", "FRAGMENT")
_LIBRARY.define("prefetch(Tensor weight, Tensor after, int num_bytes) -> ()")
_LIBRARY.define("join(Tensor x) -> ()")


def prefetch(weight: Tensor, after: Tensor, num_bytes: int) -> None:
    """Pull the weight's first bytes, once `after` has been computed."""
    torch.ops.lopa.prefetch(weight, after, num_bytes)


def join(x: Tensor) -> None:
    """Have what follows on x's device wait for the prefetch."""
    torch.ops.lopa.join(x)


def lower_prefetch() -> None:
    """Tell torchair how to lower both. To be called after in_graph.lower_attention, which looks whether it can be
    told."""
    torchair = import_module("torchair")
    import_module("torchair._ge_concrete_graph.ge_converter.custom")
    convert = torch.ops.npu.npu_prefetch.default._ge_converter

    def lowered(weight: Any, after: Any, num_bytes: int, meta_outputs: Any = None) -> None:
        convert(weight, after, num_bytes)

    def nothing(x: Any, meta_outputs: Any = None) -> None:
        pass

    torchair.register_fx_node_ge_converter(torch.ops.lopa.prefetch.default)(lowered)
    torchair.register_fx_node_ge_converter(torch.ops.lopa.join.default)(nothing)


@cache
def _second_stream(device: torch.device) -> Any:
    return torch.npu.Stream(device)


def _prefetch(weight: Tensor, after: Tensor, num_bytes: int) -> None:
    stream = _second_stream(weight.device)
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        torch.ops.npu.npu_prefetch(weight, after, num_bytes)


def _join(x: Tensor) -> None:
    torch.npu.current_stream().wait_stream(_second_stream(x.device))


KERNELS = {"lopa::prefetch": _prefetch, "lopa::join": _join}
for _name, _kernel in KERNELS.items():
    _LIBRARY.impl(_name.removeprefix("lopa::"), _kernel, "PrivateUse1")
    torch.library.register_fake(_name, lambda *_: None, lib=_LIBRARY)
    # Without results both look useless to a compiler.
    torch.fx.node.has_side_effect(getattr(torch.ops.lopa, _name.removeprefix("lopa::")).default)
