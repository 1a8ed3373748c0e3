"""D2F: blocks open while their predecessors are still being filled, and enter the cache one after another."""

from __future__ import annotations

from reference_plain.blocks import ACTIVE, TO_CACHE, Block, BlockStrategy, active_blocks, note_committed


class PipelinedBlocks(BlockStrategy):
    """Blocks are counted from the prompt's end, and the prompt is a block of its own."""

    def initial_blocks(self, num_cached: int) -> list[Block]:
        return [Block(num_cached, self.prompt_length, 0, TO_CACHE, True)]

    def opens_block(self, blocks: list[Block], last_filled_share: float) -> bool:
        max_blocks = self.decode.max_new_tokens // self.decode.block_size
        return len(blocks) <= max_blocks and last_filled_share >= self.decode.block_add_threshold

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
