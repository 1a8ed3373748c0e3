"""What the layers leave for the head: the last attention's values of every token, and the residual stream.

After the last attention no token looks at another, so the rest of the last layer is computed for read tokens alone.

Shapes: T tokens, M reads, X what attention gives a token, D model width.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from common.model import Activation
from quant.w8a8 import QuantizedActivation


class CopyRows(Protocol):
    """to[i] = parts[i], or parts[i][index], for all i."""

    def __call__(self, parts: list[Tensor], to: list[Tensor], index_M: Tensor | None = None) -> None: ...


class Handover:
    """num_captured: tokens of the largest captured pass. All captured passes leave their values in the same memory."""

    def __init__(self, copy_rows: CopyRows, num_captured: int) -> None:
        self._copy_rows = copy_rows
        self._num_captured = num_captured
        self._captured: list[Tensor] = []  # from the first captured pass on
        self._last: list[Tensor] = []

    def leave(self, attended: Activation, residual_TD: Tensor, *, is_captured: bool) -> None:
        """Keep what the layers give. attended: [T, X], quantized or not."""
        parts = [*attended, residual_TD] if isinstance(attended, QuantizedActivation) else [attended, residual_TD]
        if not is_captured:
            self._last = parts
            return
        if not self._captured:
            self._captured = [part.new_empty((self._num_captured, *part.shape[1:])) for part in parts]
        self._copy_rows(parts, [part[: len(residual_TD)] for part in self._captured])
        self.use_captured()

    def use_captured(self) -> None:
        """Turn to the values of a replay, which lie where it was captured."""
        self._last = self._captured

    def take(self, index_M: Tensor, *, is_captured: bool) -> tuple[Activation, Tensor]:
        """What `Decoder.finish` takes of the tokens of this index: [M, X] and [M, D]."""
        parts = self._captured if is_captured else self._last
        assert parts, "the layers are captured before the head"
        taken = [part.new_empty((len(index_M), *part.shape[1:])) for part in parts]
        self._copy_rows(parts, taken, index_M)
        *attended, residual_MD = taken
        return (attended[0] if len(attended) == 1 else QuantizedActivation(*attended)), residual_MD
