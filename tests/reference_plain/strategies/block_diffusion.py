"""Block diffusion (SDAR, TraDo, LLaDA2): blocks are counted from position 0, the prompt's remainder shares the first
one, attention is block-causal, and a finished block's KV is written by a pass that sees all of its tokens.
"""

from __future__ import annotations

from common.decoding.engine import Room
from reference_plain.blocks import (
    IN_CACHE,
    TO_CACHE,
    Block,
    BlockStatus,
    BlockStrategy,
    Window,
    active_blocks,
    next_chunk,
    note_committed,
    prompt_blocks,
)

_FINISHED = frozenset((TO_CACHE, IN_CACHE))


class BlockDiffusion(BlockStrategy):
    """Block diffusion. Only the last pass of a cut prompt does more than read it.

    `commit: fused` writes a finished block's KV in the first pass of the next one, `separate` in a pass of its own.

    With `edit_threshold` a block without masks is edited until a step changes nothing, or for `max_post_edit_steps`.
    """

    keeps_carry = False
    origin = 0

    @property
    def _end(self) -> int:
        return Room(self.prompt_length, self.decode).num_positions

    @property
    def _commits_apart(self) -> bool:
        """Whether a finished block's KV is written by a pass of its own, as published."""
        return self.decode.commit == "separate" and self.decode.cache != "none"

    @property
    def _begins_when(self) -> frozenset[BlockStatus]:
        """What the last block has to be before the next one opens."""
        if self.decode.cache == "none" or self.decode.commit == "separate":
            return frozenset((IN_CACHE,))
        if self.decode.edit_threshold is not None:
            return _FINISHED
        return frozenset(BlockStatus)

    def initial_blocks(self, num_cached: int) -> list[Block]:
        """The prompt's whole blocks, and the first block to be filled if the prompt has a remainder."""
        size = self.decode.block_size
        start = self.prompt_length // size * size
        status = IN_CACHE if self.decode.cache == "none" else TO_CACHE
        blocks = prompt_blocks(start, self.chunk, status)
        if self.prompt_length > start and not (blocks and self._commits_apart):
            blocks.append(self._block_at(start))
        return blocks

    def _block_at(self, start: int, is_fully_activated: bool = True) -> Block:
        end = start + self.decode.block_size
        return Block(start, end, end - max(start, self.prompt_length), is_fully_activated=is_fully_activated)

    def opens_block(self, blocks: list[Block], last_filled_share: float) -> bool:
        last = blocks[-1]
        return (
            next_chunk(blocks, self.prompt_length) is None
            and last.end < self._end
            and last.status in self._begins_when
            and last_filled_share >= self.decode.block_add_threshold
        )

    def new_block(self, blocks: list[Block]) -> Block:
        return self._block_at(blocks[-1].end, is_fully_activated=blocks[-1].end <= self.prompt_length)

    def window(self, blocks: list[Block], is_refreshed: bool) -> Window:
        if self.decode.cache == "none":
            return Window(0, blocks[-1].end, 0, 0, 0)
        if (chunk := next_chunk(blocks, self.prompt_length)) is not None:
            return Window(chunk.start, chunk.end, chunk.start, chunk.end - chunk.start, chunk.end)
        return super().window(blocks, is_refreshed)

    def fillable(self, blocks: list[Block], is_refreshed: bool) -> list[Block]:
        return [] if next_chunk(blocks, self.prompt_length) else active_blocks(blocks)

    def settle(self, blocks: list[Block], has_changed: bool) -> bool:
        if (chunk := next_chunk(blocks, self.prompt_length)) is not None:
            chunk.status = IN_CACHE
            return False
        note_committed(blocks)
        for block in active_blocks(blocks):
            block.num_steps += 1
            if not self._is_finished(block, has_changed):
                break
            block.status = IN_CACHE if self.decode.cache == "none" else TO_CACHE
        return False

    def _is_finished(self, block: Block, has_changed: bool) -> bool:
        decode = self.decode
        if block.num_masked or decode.edit_threshold is None:
            return not block.num_masked
        if block.num_edit_steps and not has_changed:
            return True
        # As published, a step more that looks and may change nothing.
        return block.num_edit_steps >= decode.max_post_edit_steps + self._commits_apart

    def is_done(self, blocks: list[Block], has_eos: bool) -> bool:
        last = blocks[-1]
        if active_blocks(blocks):
            return False
        if self.decode.commit == "separate" and last.status is not IN_CACHE:
            return False
        return has_eos or last.end >= self._end

    def final_end(self, blocks: list[Block]) -> int | None:
        """While blocks are edited, and where an end counts only once its block is finished, finished blocks."""
        if self.decode.edit_threshold is None and self.decode.end_at == "token":
            return None
        finished = {IN_CACHE} if self.decode.commit == "separate" else _FINISHED
        return max([block.end for block in blocks if block.status in finished], default=0)
