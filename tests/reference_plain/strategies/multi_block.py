"""d3LLM's multi-block decoding: blocks open as D2F's do, but the canvas is whole, and a block's KV is kept late."""

from __future__ import annotations

from reference_plain.blocks import ACTIVE, IN_CACHE, TO_CACHE, Block, Window
from reference_plain.strategies.pipelined import PipelinedBlocks


class MultiBlock(PipelinedBlocks):
    """A finished block waits for `cache_delay` passes before its KV is kept, and so does the prompt, which is finished
    a pass before the first.

    While something waits, passes forward everything and renew what is cached: attention is full, so keys in front
    change with what is filled after them.
    """

    def initial_blocks(self, num_cached: int) -> list[Block]:
        return [Block(0, self.prompt_length, 0, TO_CACHE, True, num_waits=1)]

    def window(self, blocks: list[Block], is_refreshed: bool) -> Window:
        end = self.prompt_length + self.decode.max_new_tokens // self.decode.block_size * self.decode.block_size
        cached = max([block.end for block in blocks if block.status is IN_CACHE], default=0)
        if ready := self._ready(blocks):
            return Window(cached, end, cached, ready[-1].end - cached, ready[-1].end)
        if any(block.status is TO_CACHE for block in blocks):
            return Window(0, end, 0, cached, cached)
        return Window(cached, end, cached, 0, cached)

    def settle(self, blocks: list[Block], has_changed: bool) -> bool:
        for block in self._ready(blocks):
            block.status = IN_CACHE
        for block in blocks:
            block.num_waits += block.status is TO_CACHE
        for block in blocks:
            if block.num_masked:
                break
            if block.status is ACTIVE:
                block.status = TO_CACHE
        return False

    def _ready(self, blocks: list[Block]) -> list[Block]:
        """Return the blocks whose KV the coming pass keeps, in order: none has waited longer than one in front of
        it."""
        delay = self.decode.cache_delay
        return [block for block in blocks if block.status is TO_CACHE and block.num_waits >= delay]
