"""What was used last, of so many bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_MOST = 64
_MOST_BYTES = 2**27


class Recent(Generic[K, V]):
    """Values by key, those used last: at most 64, and of `most_bytes` together. The last one stays however large it is.
    Not for several threads at once."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._num_bytes = 0

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K) -> V | None:
        """Return the value, which is the one used last from now on; None if it is not there."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def keep(self, key: K, value: V, num_bytes: int) -> None:
        """Take in a value of so many bytes, and drop what there is no more room for."""
        _, before = self._kept.pop(key, (value, 0))
        self._kept[key] = value, num_bytes
        self._num_bytes += num_bytes - before
        while len(self._kept) > 1 and (len(self._kept) > _MOST or self._num_bytes > self._most_bytes):
            _, (_, dropped) = self._kept.popitem(last=False)
            self._num_bytes -= dropped
