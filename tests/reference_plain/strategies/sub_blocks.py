"""Fast-dLLM v2: block diffusion in sub-blocks, over a model that predicts a position from the one before it. The pass
over a finished block writes its KV and predicts the first token of the next one.
"""

from __future__ import annotations

from reference_plain.blocks import (
    ACTIVE,
    IN_CACHE,
    TO_CACHE,
    Block,
    BlockStrategy,
    Window,
    num_masked_of,
    prompt_blocks,
)


class SubBlocks(BlockStrategy):
    """With `cache: dual` a step forwards the current sub-block alone and reads the block's other keys as an earlier one
    left them; it forwards the whole block where the sub-block's first position, which predicts the next, is a mask.
    """

    keeps_carry = False
    origin = 0
    _has_block_cache = False

    def initial_blocks(self, num_cached: int) -> list[Block]:
        size = self.decode.block_size
        start = self.prompt_length // size * size
        blocks = prompt_blocks(start, self.chunk, TO_CACHE)
        if self.prompt_length > start:
            end = start + size
            blocks.append(Block(start, end, end - self.prompt_length, is_fully_activated=True))
        return blocks

    def new_block(self, blocks: list[Block]) -> Block:
        start, size = blocks[-1].end, self.decode.block_size
        return Block(start, start + size, size, is_fully_activated=True)

    def window(self, blocks: list[Block], is_refreshed: bool) -> Window:
        for block in blocks:
            if block.status is TO_CACHE:
                is_last = block is blocks[-1]
                return Window(block.start, block.end, block.start, block.end - block.start, block.end, is_last)
        block, current = blocks[-1], self.fillable(blocks, is_refreshed)[0]
        start, end = block.start, block.end
        if self.decode.cache != "dual":
            return Window(start, end, start, 0, start)
        if not self._has_block_cache or self.is_masked_S[current.start]:
            return Window(start, end, start, end - start, start, is_tentative=True)
        return Window(current.start, current.end, end, current.end - current.start, start, is_tentative=True)

    def fillable(self, blocks: list[Block], is_refreshed: bool) -> list[Block]:
        """The first sub-block that holds masks, in a step that writes no final KV."""
        if any(block.status is TO_CACHE for block in blocks):
            return []
        block, size = blocks[-1], self.decode.sub_block_size or self.decode.block_size
        for start in range(block.start, block.end, size):
            num_masked = int(self.is_masked_S[start : start + size].sum())
            if num_masked:
                return [Block(start, start + size, num_masked, is_fully_activated=True, num_steps=block.num_steps)]
        return []

    def settle(self, blocks: list[Block], has_changed: bool) -> bool:
        block = next((block for block in blocks if block.status is TO_CACHE), blocks[-1])
        if block.status is TO_CACHE:
            block.status = IN_CACHE
            return False
        block.num_steps += 1
        block.num_masked = num_masked_of(block, self.is_masked_S)
        self._has_block_cache = bool(block.num_masked)
        if not block.num_masked:
            block.status = TO_CACHE
        return False

    def is_done(self, blocks: list[Block], has_eos: bool) -> bool:
        """All that was asked for is there, or an end; a finished block is not run once more for nothing."""
        wanted = self.is_masked_S[self.prompt_length : self.prompt_length + self.decode.max_new_tokens]
        return not wanted.any() or (has_eos and blocks[-1].status is not ACTIVE)

    def final_end(self, blocks: list[Block]) -> int | None:
        if self.decode.end_at == "token":
            return None
        done = [block.end for block in blocks if block.status is not ACTIVE]
        return max(done, default=0)
