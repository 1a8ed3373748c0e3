"""Strategies whose canvas is whole from the start: Fast-dLLM over LLaDA and Dream, and vanilla."""

from __future__ import annotations

from reference_plain.blocks import ACTIVE, IN_CACHE, Block, BlockStrategy, Window, active_blocks, num_masked_of


class OneBlockAtATime(BlockStrategy):
    """Fast-dLLM: a fixed canvas in blocks decoded in order; one full forward at each block's start rebuilds the cache.

    With `cache: none` every forward is a full one, which with `fill_rule: static` is LLaDA's own way.
    """

    def initial_blocks(self, num_cached: int) -> list[Block]:
        size, prompt_length = self.decode.block_size, self.prompt_length
        canvas_length = self.decode.max_new_tokens // size * size
        starts = range(prompt_length, prompt_length + canvas_length, size)
        canvas = [Block(start, start + size, size, is_fully_activated=True) for start in starts]
        return [Block(0, prompt_length, 0, IN_CACHE, True), *canvas]

    def window(self, blocks: list[Block], is_refreshed: bool) -> Window:
        current, end = _current(blocks), blocks[-1].end
        cache = self.decode.cache
        if cache == "none":
            return Window(0, end, 0, 0, 0)
        if not is_refreshed:
            return Window(0, end, 0, end if cache == "dual" else current.start, current.start)
        if cache == "dual":
            return Window(current.start, current.end, end, 0, current.start)
        return Window(current.start, end, current.start, 0, current.start)

    def fillable(self, blocks: list[Block], is_refreshed: bool) -> list[Block]:
        """The current block; where the cache is rebuilt, also what `max_block_steps` has left in those before it."""
        current = _current(blocks)
        left = [block for block in blocks if block.start < current.start and block.num_masked]
        if is_refreshed or not left:
            return [current]
        num_masked = current.num_masked + sum(block.num_masked for block in left)
        return [Block(left[0].start, current.end, num_masked, is_fully_activated=True, num_steps=current.num_steps)]

    def settle(self, blocks: list[Block], has_changed: bool) -> bool:
        decode, current = self.decode, _current(blocks)
        current.num_steps += 1
        if decode.max_block_steps is not None:
            for block in blocks:
                block.num_masked = num_masked_of(block, self.is_masked_S)
        if current.num_steps < decode.min_block_steps:
            return False
        is_stale = current.num_steps == decode.max_block_steps
        if is_stale:
            current.status = IN_CACHE
        for block in active_blocks(blocks):
            if block.num_masked:
                break
            block.status, is_stale = IN_CACHE, True
        return is_stale


class WholeCanvas(OneBlockAtATime):
    """Vanilla: the canvas is one block and nothing is cached; every step forwards the prompt and the canvas."""

    def initial_blocks(self, num_cached: int) -> list[Block]:
        size, prompt_length = self.decode.max_new_tokens, self.prompt_length
        canvas = Block(prompt_length, prompt_length + size, size, is_fully_activated=True)
        return [Block(0, prompt_length, 0, IN_CACHE, True), canvas]

    def window(self, blocks: list[Block], is_refreshed: bool) -> Window:
        return Window(0, blocks[-1].end, 0, 0, 0)

    def fillable(self, blocks: list[Block], is_refreshed: bool) -> list[Block]:
        return active_blocks(blocks)

    def settle(self, blocks: list[Block], has_changed: bool) -> bool:
        blocks[-1].num_steps += 1
        if blocks[-1].num_masked == 0:
            blocks[-1].status = IN_CACHE
        return False


def _current(blocks: list[Block]) -> Block:
    return next(block for block in blocks if block.status is ACTIVE)
