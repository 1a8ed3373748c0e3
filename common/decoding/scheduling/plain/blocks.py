"""A request's blocks: fixed spans decoded together, and what each strategy does with them: D2F, Fast-dLLM,
vanilla.

A strategy says which blocks exist, which may be filled, what a step's window is and when a block's KV becomes final.
LoPA's branches, scores and spawning are the same over all three and live in the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from common.config import DecodeConfig


class BlockStatus(Enum):
    ACTIVE = auto()  # holds masks, or waits behind a block that does
    TO_CACHE = auto()  # full; the next forward writes its final KV
    IN_CACHE = auto()


@dataclass(slots=True)
class Block:
    """Positions [start, end); the prompt is block 0 and counts as full."""

    start: int
    end: int
    num_masked: int
    status: BlockStatus = BlockStatus.ACTIVE
    is_fully_activated: bool = False

    @property
    def filled_share(self) -> float:
        return 1.0 - self.num_masked / (self.end - self.start)


class Window(NamedTuple):
    """What a step computes: positions [start, end) beside cached keys up to `cached`; the first `commit_length`
    become final.

    next_start: where the following step's window begins, whose first position is predicted from this step.
    """

    start: int
    end: int
    cached: int
    commit_length: int
    next_start: int

    def until(self, end: int) -> Window:
        return self._replace(end=end)


class BlockStrategy(Protocol):
    """The plain decoding rule under the lookahead branches."""

    def initial_blocks(self, prompt_length: int, num_cached: int) -> list[Block]:
        """num_cached: positions of the prompt whose KV is there already."""

    def opens_block(self, blocks: list[Block], last_filled_share: float) -> bool:
        """Whether a branch whose last block is filled this far appends one block of masks."""

    def new_block(self, blocks: list[Block]) -> Block: ...

    def window(self, blocks: list[Block], is_refreshed: bool) -> Window: ...

    def fillable(self, blocks: list[Block]) -> list[Block]:
        """Blocks whose masks may be filled, and from which lookaheads are spawned."""

    def settle(self, blocks: list[Block]) -> bool:
        """Move full blocks towards the cache after the winner's fill; True if the cache must be rebuilt next step."""


@dataclass(frozen=True, slots=True)
class PipelinedBlocks:
    """D2F: blocks open while their predecessors are still being filled, and enter the cache one after another."""

    decode: DecodeConfig

    def initial_blocks(self, prompt_length: int, num_cached: int) -> list[Block]:
        return [Block(num_cached, prompt_length, 0, BlockStatus.TO_CACHE, True)]

    def opens_block(self, blocks: list[Block], last_filled_share: float) -> bool:
        max_blocks = self.decode.max_new_tokens // self.decode.block_size
        return len(blocks) <= max_blocks and last_filled_share >= self.decode.block_add_threshold

    def new_block(self, blocks: list[Block]) -> Block:
        start, size = blocks[-1].end, self.decode.block_size
        return Block(start, start + size, size, is_fully_activated=len(blocks) == 1)

    def window(self, blocks: list[Block], is_refreshed: bool) -> Window:
        committing = [block for block in blocks if block.status is BlockStatus.TO_CACHE]
        pending = [block for block in blocks if block.status is BlockStatus.ACTIVE]
        start = (committing or pending)[0].start
        commit_end = committing[-1].end if committing else start
        return Window(start, blocks[-1].end, start, commit_end - start, commit_end)

    def fillable(self, blocks: list[Block]) -> list[Block]:
        return [block for block in blocks if block.status is BlockStatus.ACTIVE]

    def settle(self, blocks: list[Block]) -> bool:
        for block in blocks:
            if block.status is BlockStatus.TO_CACHE:
                block.status = BlockStatus.IN_CACHE
        for block in blocks:
            if block.status is BlockStatus.ACTIVE:
                if block.num_masked:
                    break
                block.status = BlockStatus.TO_CACHE
        return False


@dataclass(frozen=True, slots=True)
class OneBlockAtATime:
    """Fast-dLLM: a fixed canvas in blocks decoded in order; one full forward at each block's start rebuilds the
    cache."""

    decode: DecodeConfig

    def initial_blocks(self, prompt_length: int, num_cached: int) -> list[Block]:
        size = self.decode.block_size
        canvas_length = self.decode.max_new_tokens // size * size
        starts = range(prompt_length, prompt_length + canvas_length, size)
        canvas = [Block(start, start + size, size, is_fully_activated=True) for start in starts]
        return [Block(0, prompt_length, 0, BlockStatus.IN_CACHE, True), *canvas]

    def opens_block(self, blocks: list[Block], last_filled_share: float) -> bool:
        return False

    def new_block(self, blocks: list[Block]) -> Block:
        raise AssertionError("the canvas is whole from the start")

    def window(self, blocks: list[Block], is_refreshed: bool) -> Window:
        current, end = self.fillable(blocks)[0], blocks[-1].end
        is_dual = self.decode.cache == "dual"
        if not is_refreshed:
            return Window(0, end, 0, end if is_dual else current.start, current.start)
        if is_dual:
            return Window(current.start, current.end, end, 0, current.start)
        return Window(current.start, end, current.start, 0, current.start)

    def fillable(self, blocks: list[Block]) -> list[Block]:
        return [block for block in blocks if block.status is BlockStatus.ACTIVE][:1]

    def settle(self, blocks: list[Block]) -> bool:
        is_stale = False
        for block in blocks:
            if block.status is BlockStatus.ACTIVE:
                if block.num_masked:
                    break
                block.status, is_stale = BlockStatus.IN_CACHE, True
        return is_stale


@dataclass(frozen=True, slots=True)
class WholeCanvas:
    """Vanilla: the canvas is one block and nothing is cached; every step forwards the prompt and the canvas."""

    decode: DecodeConfig

    def initial_blocks(self, prompt_length: int, num_cached: int) -> list[Block]:
        size = self.decode.max_new_tokens
        canvas = Block(prompt_length, prompt_length + size, size, is_fully_activated=True)
        return [Block(0, prompt_length, 0, BlockStatus.IN_CACHE, True), canvas]

    def opens_block(self, blocks: list[Block], last_filled_share: float) -> bool:
        return False

    def new_block(self, blocks: list[Block]) -> Block:
        raise AssertionError("the canvas is whole from the start")

    def window(self, blocks: list[Block], is_refreshed: bool) -> Window:
        return Window(0, blocks[-1].end, 0, 0, 0)

    def fillable(self, blocks: list[Block]) -> list[Block]:
        return [block for block in blocks if block.status is BlockStatus.ACTIVE]

    def settle(self, blocks: list[Block]) -> bool:
        if blocks[-1].num_masked == 0:
            blocks[-1].status = BlockStatus.IN_CACHE
        return False


STRATEGIES: dict[str, type[PipelinedBlocks] | type[OneBlockAtATime] | type[WholeCanvas]] = {
    "d2f": PipelinedBlocks,
    "fast_dllm": OneBlockAtATime,
    "vanilla": WholeCanvas,
}


def block_strategy(decode: DecodeConfig) -> BlockStrategy:
    return STRATEGIES[decode.strategy](decode)
