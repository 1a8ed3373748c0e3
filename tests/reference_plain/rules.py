"""How one request is decoded: its settings, and what follows from them. Requests of equal settings share one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from old_settings import Flat

from common.config import DecodeConfig

BLOCKS_FROM_ZERO = ("block_diffusion", "fast_dllm_v2")
NO_TOKEN = -1  # what an anchor adds, too


class StopSearch(Protocol):
    """Looks for a request's stop strings while its tokens become final.

    num_seen: generated ids that it has looked at.
    """

    num_seen: int

    def find(self, more_ids: Sequence[int], is_over: bool) -> int | None:
        """How many of the ids to keep, those after the seen ones with them; None: nothing stops them. is_over: no
        others will come."""


FindStop = Callable[[], StopSearch]  # for a request that begins
StopFinder = Callable[[DecodeConfig], "FindStop | None"]  # None: of settings without stop strings


def no_stop_strings(decode: DecodeConfig) -> FindStop | None:
    """The StopFinder of a scheduler that has no tokenizer."""
    if decode.stop:
        raise ValueError(f"stop strings {list(decode.stop)} need a tokenizer: give the scheduler a stop_finder")
    return None


class ModelFacts(NamedTuple):
    """What the scheduler has to know of a model; the names are those of `common.checkpoint.ModelConfig`.

    shift: 1: a position's token is predicted by the entry before it; 0: by its own. more_end_token_ids: end a text too,
    unless a request's settings name an end token.
    """

    shift: int = 1
    more_end_token_ids: tuple[int, ...] = ()


DREAM = ModelFacts()


def beyond_arrays(decode: DecodeConfig) -> str | None:
    """The first setting whose value `arrays` does not know; None: it knows all."""
    is_known = {
        "strategy": decode.strategy in ("d2f", "fast_dllm", "vanilla"),
        "cache": decode.cache != "none",
        "fill_rule": decode.fill_rule == "threshold",
        "mask_probability": decode.mask_probability == "excluded",
        "min_block_steps": decode.min_block_steps == 1,
        "max_block_steps": decode.max_block_steps is None,
    }
    return next((name for name, known in is_known.items() if not known), None)


class Lookahead(NamedTuple):
    """A branch as policies see it (`policies.inputs.Tried`)."""

    position: int | None
    token: int
    creation_confidence: float


class Kind(NamedTuple):
    """What requests must have in common to lie in one `RequestBatch`; the names are DecodeConfig's.

    block_size: of `vanilla` the whole canvas.
    """

    strategy: str
    block_size: int
    branch_score: str
    bottom_share: float
    spawn_rule: str
    lookahead_rule: str
    spawn_blocks: str
    window_attention: str
    shift_row: str
    cache: str

    @classmethod
    def of(cls, decode: DecodeConfig) -> Kind:
        settings = (getattr(decode, name) for name in cls._fields[2:])
        size = decode.max_new_tokens if decode.strategy == "vanilla" else decode.block_size
        return cls(decode.strategy, size, *settings)


@dataclass(frozen=True, eq=False)
class Rules:
    """eos_token_id: the settings' own, or the model's; None: nothing ends a text, which settings say by -1.

    chunk: positions of a prompt that one pass takes, whole blocks: a longer prompt takes several passes. None: any
    number, where a prompt's positions see each other, so that it cannot be cut.
    """

    decode: DecodeConfig
    kind: Kind
    eos_token_id: int | None
    find_stop: FindStop | None
    sampling: tuple[float, float, float]  # in the order of plan.SamplingField
    shift: int = 1
    end_token_ids: frozenset[int] = frozenset()
    chunk: int | None = None

    @classmethod
    def of(
        cls,
        decode: DecodeConfig,
        eos_token_id: int | None,
        stop_finder: StopFinder,
        facts: ModelFacts = DREAM,
        max_num_batched_tokens: int | None = None,
    ) -> Rules:
        decode = Flat(decode)
        own = eos_token_id if decode.eos_token_id is None else decode.eos_token_id
        more = facts.more_end_token_ids if decode.eos_token_id is None else ()
        sampling = decode.temperature, decode.top_p, float(decode.top_k or 0)
        stop = stop_finder(decode)
        own = None if own == NO_TOKEN else own
        ends = frozenset((() if own is None else (own, *more)) + decode.stop_token_ids)
        chunk = None
        if max_num_batched_tokens is not None and decode.strategy in BLOCKS_FROM_ZERO and decode.cache != "none":
            chunk = max(1, max_num_batched_tokens // decode.block_size) * decode.block_size
        return cls(decode, Kind.of(decode), own, stop, sampling, facts.shift, ends, chunk)

    def num_first(self, prompt_length: int) -> int:
        """Prompt tokens of a request's first pass."""
        return prompt_length if self.chunk is None else min(self.chunk, prompt_length)

    @cached_property  # this and what else is cached are asked at every step
    def is_sampled(self) -> bool:
        return self.decode.temperature > 0

    @cached_property
    def fits_arrays(self) -> bool:
        """Whether `arrays` decodes such requests; `plain` decodes all."""
        return self.shift == 1 and self.end_token_ids <= {self.eos_token_id} and beyond_arrays(self.decode) is None

    @property
    def max_blocks(self) -> int:
        """Blocks of a whole canvas."""
        return self.decode.max_new_tokens // self.kind.block_size

    @cached_property
    def max_steps(self) -> int:
        """More than any request needs, unless it is set."""
        decode = self.decode
        if decode.max_steps is not None:
            return decode.max_steps
        most = 2 * decode.max_new_tokens + 16
        if decode.strategy in BLOCKS_FROM_ZERO:
            edits = 0 if decode.edit_threshold is None else decode.max_post_edit_steps + 2
            most += (decode.max_new_tokens // decode.block_size + 2) * (decode.block_size + edits)
        if decode.strategy == "fast_dllm":
            most += self.max_blocks * decode.min_block_steps
        return most
