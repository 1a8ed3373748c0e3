"""The linears that may be quantized, by their names at run time and in a checkpoint.

Who reads checkpoints hands them in (`common.checkpoint.quantizable`); everything else (embeddings, norms, routers,
lm_head) stays float.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quant.errors import QuantizationError

LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")  # of a layer, at run time
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")  # as a checkpoint writes a layer's; other digits would name it twice
_SHARED_EXPERTS = "moe.shared_"


class Part(NamedTuple):
    """Some of a checkpoint's linear. shape: [N, K] of its whole weight. rows, columns: what is read of it."""

    module: str
    shape: tuple[int, int]
    rows: slice
    columns: slice


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """One linear of the running model, e.g. layer 3's qkv_proj: parts stacked along rows.

    num_experts: above 0 the parts are those of so many experts, one expert after the other. adds_bias: False where
    another rank adds it, since the ranks' results are summed.
    """

    layer: int
    kind: str
    parts: tuple[Part, ...]
    num_experts: int = 0
    adds_bias: bool = True

    def __str__(self) -> str:
        return f"layers.{self.layer}.{self.kind}"

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.module for part in self.parts))

    @property
    def stays_float(self) -> bool:
        """Whether every engine computes it in floats: shared experts."""
        return self.kind.startswith(_SHARED_EXPERTS)


@dataclass(frozen=True, slots=True)
class Layout:
    """A model's linears in the order of its layers, and what quantizing asks of the rest.

    layer: how the names of a layer's tensors begin, with {i} for its number. tied_head: the head's name where it shares
    the embedding's weight, and may be in no file.
    """

    linears: tuple[Linear, ...]
    num_layers: int
    layer: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    tied_head: str | None = None

    def layer_of(self, name: str) -> int | None:
        """The number of the layer whose tensor this is."""
        before, _, after = self.layer.partition("{i}")
        number = name.removeprefix(before).partition(after)[0]
        is_own = name.startswith(before) and _NUMBER.fullmatch(number) is not None
        return int(number) if is_own else None

    def of_modules(self) -> dict[str, Linear]:
        """The linear that each of the checkpoint's modules belongs to."""
        return {module: linear for linear in self.linears for module in linear.modules}


def find_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The running model's float linears by name: modules with a weight [N, K] and one of the names above."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_float = isinstance(weight, Tensor) and weight.dim() == 2 and weight.dtype in FLOATS
        if is_float and name.rpartition(".")[2] in LINEARS:
            yield name, module


def excluded_linears(linears: Iterable[Linear], patterns: Sequence[str]) -> frozenset[Linear]:
    """Linears that a pattern (fnmatch) names by run-time or checkpoint name; a merged linear goes as a whole.

    Raises QuantizationError for a pattern that names nothing: a typing error would quantize a layer that must not be.
    """
    names = {linear: (str(linear), *linear.modules) for linear in linears}
    chosen: set[Linear] = set()
    for pattern in patterns:
        hits = {linear for linear, own in names.items() if any(fnmatchcase(name, pattern) for name in own)}
        if not hits:
            raise QuantizationError(unmatched(pattern))
        chosen |= hits
    return frozenset(chosen)


def unmatched(pattern: str) -> str:
    return f"exclude {pattern!r} names no linear of the model: write e.g. 'layers.0.*' or '*.down_proj'"
