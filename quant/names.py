"""Which linears are quantized, their names in checkpoints and at run time, and how tensor parallelism cuts them.

Hugging Face files hold `model.layers.3.self_attn.q_proj`; the running model has `layers.3.qkv_proj`. Everything else
(embeddings, norms, lm_head) stays float.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from quant.errors import QuantizationError


@dataclass(frozen=True, slots=True)
class LinearKind:
    """A linear of a decoder layer: the checkpoint modules merged into it, and the dimension that ranks share."""

    parts: tuple[str, ...]
    parallel: Literal["column", "row"]


LINEARS = {
    "qkv_proj": LinearKind(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "column"),
    "o_proj": LinearKind(("self_attn.o_proj",), "row"),
    "gate_up_proj": LinearKind(("mlp.gate_proj", "mlp.up_proj"), "column"),
    "down_proj": LinearKind(("mlp.down_proj",), "row"),
}
NUMBER = "0|[1-9][0-9]{0,8}"  # as a checkpoint writes a layer's; other digits would name the same one twice
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_KIND_OF_PART = {part: kind for kind, linear in LINEARS.items() for part in linear.parts}
_CHECKPOINT = re.compile(rf"model\.layers\.({NUMBER})\.(.+)")


@dataclass(frozen=True, slots=True, order=True)
class LinearName:
    """One linear of the running model, e.g. layer 3's qkv_proj."""

    layer: int
    kind: str

    def __str__(self) -> str:
        return f"layers.{self.layer}.{self.kind}"

    @property
    def checkpoint_names(self) -> tuple[str, ...]:
        return tuple(f"model.layers.{self.layer}.{part}" for part in LINEARS[self.kind].parts)


def linear_of(checkpoint_module: str) -> LinearName | None:
    """The running model's linear that a checkpoint module belongs to; None if it is not one that is quantized."""
    match = _CHECKPOINT.fullmatch(checkpoint_module)
    if match is None or match[2] not in _KIND_OF_PART:
        return None
    return LinearName(int(match[1]), _KIND_OF_PART[match[2]])


def find_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The running model's float linears by name: modules with a weight [N, K] and one of the names above."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_float = isinstance(weight, Tensor) and weight.dim() == 2 and weight.dtype in FLOATS
        if is_float and name.rpartition(".")[2] in LINEARS:
            yield name, module


def excluded_linears(linears: Iterable[LinearName], patterns: Sequence[str]) -> frozenset[LinearName]:
    """Linears that a pattern (fnmatch) names by run-time or checkpoint name; a merged linear goes as a whole.

    Raises QuantizationError for a pattern that names nothing: a typing error would quantize a layer that must not be.
    """
    names = {linear: (str(linear), *linear.checkpoint_names) for linear in linears}
    chosen: set[LinearName] = set()
    for pattern in patterns:
        hits = {linear for linear, own in names.items() if any(fnmatchcase(name, pattern) for name in own)}
        if not hits:
            raise QuantizationError(unmatched(pattern))
        chosen |= hits
    return frozenset(chosen)


def unmatched(pattern: str) -> str:
    return f"exclude {pattern!r} names no linear of the model: write e.g. 'layers.0.*' or '*.down_proj'"
