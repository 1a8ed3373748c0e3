"""How one request is decoded: its settings, and what follows from them. Requests of equal settings share one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.config import DecodeConfig
from common.decoding.scheduling.blocks import BlockStrategy, block_strategy

# Generated ids so far, and how many of them are known to hold no stop string -> how many of them to keep, or None.
FindStop = Callable[[Sequence[int], int], "int | None"]
StopFinder = Callable[[Sequence[str]], "FindStop | None"]  # stop strings -> what looks for them; None without any


def no_stop_strings(stops: Sequence[str]) -> FindStop | None:
    """The StopFinder of a scheduler that has no tokenizer."""
    if stops:
        raise ValueError(f"stop strings {list(stops)} need a tokenizer: give the scheduler a stop_finder")
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """eos_token_id: the settings' own, or the model's; None: nothing ends a text."""

    decode: DecodeConfig
    strategy: BlockStrategy
    eos_token_id: int | None
    find_stop: FindStop | None

    @classmethod
    def of(cls, decode: DecodeConfig, eos_token_id: int | None, stop_finder: StopFinder) -> Rules:
        own = eos_token_id if decode.eos_token_id is None else decode.eos_token_id
        return cls(decode, block_strategy(decode), own, stop_finder(decode.stop))
