"""How one request is decoded: its settings, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from old_settings import Flat

from common.config import DecodeConfig
from common.decoding import ModelFacts
from common.decoding.scheduling.rules import NO_TOKEN, StopFinder

BLOCKS_FROM_ZERO = ("block_diffusion", "fast_dllm_v2")


@dataclass(frozen=True, eq=False)
class Rules:
    """chunk: positions of a prompt that one pass takes, whole blocks: a longer prompt takes several passes. None: any
    number, where a prompt's positions see each other, so that it cannot be cut."""

    decode: Flat
    sampling: tuple[float, float, float]  # in the order of plan.SamplingField
    shift: int
    end_token_ids: frozenset[int]
    chunk: int | None

    @classmethod
    def of(
        cls, settings: DecodeConfig, eos_token_id: int, stop_finder: StopFinder, facts: ModelFacts,
        max_num_batched_tokens: int | None,
    ) -> Rules:  # fmt: skip
        assert stop_finder(settings) is None, "stop strings are none of the oracle's"
        decode = Flat(settings)
        ends = (eos_token_id, *facts.more_end_token_ids) if decode.eos_token_id is None else (decode.eos_token_id,)
        sampling = decode.temperature, decode.top_p, float(decode.top_k or 0)
        chunk = None
        if max_num_batched_tokens is not None and decode.strategy in BLOCKS_FROM_ZERO and decode.cache != "none":
            chunk = max(1, max_num_batched_tokens // decode.block_size) * decode.block_size
        return cls(decode, sampling, facts.shift, frozenset(ends + decode.stop_token_ids) - {NO_TOKEN}, chunk)

    @property
    def block_size(self) -> int:
        """Positions of a block; with `vanilla` the whole canvas is one."""
        return int(self.decode.max_new_tokens if self.decode.strategy == "vanilla" else self.decode.block_size)

    @property
    def max_steps(self) -> int:
        """More than any request needs, unless it is set."""
        decode = self.decode
        if decode.max_steps is not None:
            return int(decode.max_steps)
        most = 2 * decode.max_new_tokens + 16
        if decode.strategy in BLOCKS_FROM_ZERO:
            edits = 0 if decode.edit_threshold is None else decode.max_post_edit_steps + 2
            most += (decode.max_new_tokens // decode.block_size + 2) * (decode.block_size + edits)
        if decode.strategy == "fast_dllm":
            most += decode.max_new_tokens // self.block_size * decode.min_block_steps
        return int(most)
