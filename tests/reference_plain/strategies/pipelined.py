"""D2F: blocks open while their predecessors are still being filled, and enter the cache one after another."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import DecodeConfig
from reference_plain.blocks import (
    ACTIVE,
    TO_CACHE,
    Block,
    Window,
    active_blocks,
    note_committed,
    window_behind_cache,
)


@dataclass(frozen=True, slots=True)
class PipelinedBlocks:
    """Blocks are counted from the prompt's end, and the prompt is a block of its own."""

    decode: DecodeConfig
    prompt_length: int
    keeps_carry: bool = True

    @property
    def origin(self) -> int | None:
        return self.prompt_length

    def initial_blocks(self, num_cached: int) -> list[Block]:
        return [Block(num_cached, self.prompt_length, 0, TO_CACHE, True)]

    def opens_block(self, blocks: list[Block], last_filled_share: float) -> bool:
        max_blocks = self.decode.max_new_tokens // self.decode.block_size
        return len(blocks) <= max_blocks and last_filled_share >= self.decode.block_add_threshold

    def new_block(self, blocks: list[Block]) -> Block:
        start, size = blocks[-1].end, self.decode.block_size
        return Block(start, start + size, size, is_fully_activated=len(blocks) == 1)

    def window(self, blocks: list[Block], is_refreshed: bool) -> Window:
        return window_behind_cache(blocks)

    def fillable(self, blocks: list[Block], is_refreshed: bool) -> list[Block]:
        return active_blocks(blocks)

    def settle(self, blocks: list[Block], has_changed: bool) -> bool:
        note_committed(blocks)
        for block in active_blocks(blocks):
            if block.num_masked:
                break
            block.status = TO_CACHE
        return False

    def is_done(self, blocks: list[Block], has_eos: bool) -> bool:
        for block in reversed(blocks):
            if block.num_masked or block.status is ACTIVE:
                return False
        return has_eos or not self.opens_block(blocks, last_filled_share=1.0)

    def final_end(self, blocks: list[Block]) -> int | None:
        return None
