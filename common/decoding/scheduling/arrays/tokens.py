"""The tokens of all requests, in one array."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.decoding.plan import Bool, Int
from common.decoding.scheduling.state import DecodingRequest


class TokenTable:
    """Prompts and canvases by slot and absolute position; rows grow with the longest request.

    token_S, is_masked_S: one slot behind another, `stride` positions each; positions that are not opened yet are masks.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._resize(256)

    def write(self, slot: int, prompt: tuple[int, ...], length: int, mask_token_id: int) -> bool:
        """Put a prompt into the slot, and masks behind it up to length; whether the others have moved for it."""
        is_longer = length >= self.stride  # one position more, so that every position has one behind it
        if is_longer:
            token_S, is_masked_S, stride = self.token_S, self.is_masked_S, self.stride
            self._resize(max(length + 1, 2 * stride))
            self.token_S.reshape(-1, self.stride)[:, :stride] = token_S.reshape(-1, stride)
            self.is_masked_S.reshape(-1, self.stride)[:, :stride] = is_masked_S.reshape(-1, stride)
        token_S, is_masked_S = self.of(slot)
        token_S[: len(prompt)], token_S[len(prompt) :] = prompt, mask_token_id
        is_masked_S[: len(prompt)], is_masked_S[len(prompt) :] = False, True
        return is_longer

    def of(self, slot: int) -> tuple[Int, Bool]:
        """The slot's tokens, and which of them are masks; views."""
        own = slice(slot * self.stride, (slot + 1) * self.stride)
        return self.token_S[own], self.is_masked_S[own]

    def _resize(self, stride: int) -> None:
        self.stride = stride
        self.token_S: Int = np.zeros(self._num_slots * stride, dtype=np.int64)
        self.is_masked_S: Bool = np.zeros(self._num_slots * stride, dtype=np.bool_)


@dataclass(slots=True, eq=False, kw_only=True)
class TableRequest(DecodingRequest):
    """A request whose tokens lie in a table."""

    table: TokenTable

    @property
    def token_S(self) -> Int:
        return self.table.of(self.slot)[0]

    @property
    def is_masked_S(self) -> Bool:
        return self.table.of(self.slot)[1]
