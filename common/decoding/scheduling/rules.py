"""How one request is decoded: its settings, and what follows from them. Requests of equal settings share one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.config import DecodeConfig

# Generated ids so far, and how many of them are known to hold no stop string -> how many of them to keep, or None.
FindStop = Callable[[Sequence[int], int], "int | None"]
StopFinder = Callable[[Sequence[str]], "FindStop | None"]  # stop strings -> what looks for them; None without any

NO_TOKEN = -1  # what an anchor adds, too


def no_stop_strings(stops: Sequence[str]) -> FindStop | None:
    """The StopFinder of a scheduler that has no tokenizer."""
    if stops:
        raise ValueError(f"stop strings {list(stops)} need a tokenizer: give the scheduler a stop_finder")
    return None


class Kind(NamedTuple):
    """What requests must have in common to lie in one `RequestBatch`; the names are DecodeConfig's.

    block_size: of `vanilla` the whole canvas. span: of `branch_score: sliding_window`.
    """

    strategy: str
    block_size: int
    span: int
    branch_score: str
    bottom_share: float
    spawn_rule: str
    spawn_blocks: str
    window_attention: str
    shift_row: str
    cache: str

    @classmethod
    def of(cls, decode: DecodeConfig) -> Kind:
        settings = (getattr(decode, name) for name in cls._fields[3:])
        size = decode.max_new_tokens if decode.strategy == "vanilla" else decode.block_size
        return cls(decode.strategy, size, decode.block_size, *settings)


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """eos_token_id: the settings' own, or the model's; None: nothing ends a text, which settings say by -1."""

    decode: DecodeConfig
    kind: Kind
    eos_token_id: int | None
    find_stop: FindStop | None
    sampling: tuple[float, float, float]  # in the order of plan.SamplingField

    @classmethod
    def of(cls, decode: DecodeConfig, eos_token_id: int | None, stop_finder: StopFinder) -> Rules:
        own = eos_token_id if decode.eos_token_id is None else decode.eos_token_id
        sampling = decode.temperature, decode.top_p, float(decode.top_k or 0)
        end = None if own == NO_TOKEN else own
        return cls(decode, Kind.of(decode), end, stop_finder(decode.stop), sampling)

    @property
    def is_sampled(self) -> bool:
        return self.decode.temperature > 0

    @property
    def max_blocks(self) -> int:
        """Blocks of a whole canvas."""
        return self.decode.max_new_tokens // self.kind.block_size

    @property
    def max_steps(self) -> int:
        return self.decode.max_steps or 2 * self.decode.max_new_tokens + 16
