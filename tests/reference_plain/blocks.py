"""A request's blocks, the window of a step over them, and what a strategy has to say about both."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from common.decoding.plan import Bool


class BlockStatus(Enum):
    ACTIVE = auto()  # holds masks, waits for a block that does, or is still edited
    TO_CACHE = auto()  # finished; the next forward writes its final KV
    IN_CACHE = auto()


ACTIVE, TO_CACHE, IN_CACHE = BlockStatus


@dataclass(slots=True)
class Block:
    """Positions [start, end); what the prompt fills of them counts as full.

    num_steps: steps that could fill it. num_edit_steps: those of them that began without a mask. num_waits: passes that
    it has waited for the cache (`cache_delay`).
    """

    start: int
    end: int
    num_masked: int
    status: BlockStatus = ACTIVE
    is_fully_activated: bool = False
    num_steps: int = 0
    num_edit_steps: int = 0
    num_waits: int = 0

    @property
    def filled_share(self) -> float:
        return self.share_with(0)

    def share_with(self, num_more: int) -> float:
        """Filled, if so many of its masks were."""
        return 1.0 - (self.num_masked - num_more) / (self.end - self.start)


class Window(NamedTuple):
    """What a step computes: positions [start, end) beside cached keys up to `cached`; the first `commit_length`
    become final.

    next_start: where the following step's window begins, whose first position is predicted from this step.
    predicts_next: the step also predicts the position after the window, which begins the next block.
    is_tentative: what is committed differs from branch to branch, and is written over later.
    """

    start: int
    end: int
    cached: int
    commit_length: int
    next_start: int
    predicts_next: bool = False
    is_tentative: bool = False


class BlockStrategy:
    """The plain decoding rule under the lookahead branches.

    keeps_carry: the token after the cache is predicted by the step that committed the position before it.
    chunk: positions of a prompt that a pass takes, where prompts are cut (`Rules.chunk`).
    is_masked_S: the request's masks, by absolute position, as they are at any time.
    """

    keeps_carry = True

    def __init__(self, decode: Any, prompt_length: int, is_masked_S: Bool, chunk: int | None) -> None:
        self.decode = decode
        self.prompt_length = prompt_length
        self.is_masked_S = is_masked_S
        self.chunk = chunk

    @property
    def origin(self) -> int:
        """Where blocks are counted from: a position before it lies in one block with all others before it."""
        return self.prompt_length

    def initial_blocks(self, num_cached: int) -> list[Block]:
        """num_cached: positions of the prompt whose KV is there already."""
        raise NotImplementedError

    def opens_block(self, blocks: list[Block], last_filled_share: float) -> bool:
        """Whether a branch whose last block is filled this far appends one block of masks. One that is filled further
        does, too."""
        return False

    def new_block(self, blocks: list[Block]) -> Block:
        start, size = blocks[-1].end, self.decode.block_size
        return Block(start, start + size, size, is_fully_activated=len(blocks) == 1)

    def window(self, blocks: list[Block], is_refreshed: bool) -> Window:
        """Everything that is not cached yet; what waits for the cache becomes final."""
        first = num_committed = len(blocks) - len(active_blocks(blocks))
        while first and blocks[first - 1].status is TO_CACHE:
            first -= 1
        # A branch may open the first block after what is cached.
        start = blocks[first].start if first < len(blocks) else blocks[-1].end
        commit_end = blocks[num_committed - 1].end if first < num_committed else start
        return Window(start, blocks[-1].end, start, commit_end - start, commit_end)

    def fillable(self, blocks: list[Block], is_refreshed: bool) -> list[Block]:
        """Blocks, or parts of one, whose masks may be filled, and from which lookaheads are spawned."""
        return active_blocks(blocks)

    def settle(self, blocks: list[Block], has_changed: bool) -> bool:
        """Move finished blocks towards the cache after the winner's fill; True if the cache must be rebuilt next step.
        has_changed: the step has filled or edited something."""
        raise NotImplementedError

    def is_done(self, blocks: list[Block], has_eos: bool) -> bool:
        """Nothing is left to do."""
        return not active_blocks(blocks)

    def final_end(self, blocks: list[Block]) -> int | None:
        """Filled positions below this can no longer change; None: no filled position can."""
        return None


def active_blocks(blocks: list[Block]) -> list[Block]:
    """Return the active ones of a list, after those in the cache and those that wait for it."""
    count = len(blocks)
    while count and blocks[count - 1].status is ACTIVE:
        count -= 1
    return blocks[count:]


def prompt_blocks(prompt_end: int, chunk: int | None, status: BlockStatus) -> list[Block]:
    """A prompt's whole blocks [0, prompt_end), in chunks of so many positions that each take a pass."""
    size = chunk or max(prompt_end, 1)
    return [
        Block(start, min(start + size, prompt_end), 0, status, is_fully_activated=True)
        for start in range(0, prompt_end, size)
    ]


def prompt_part(blocks: list[Block], prompt_length: int) -> Block | None:
    """The part of the prompt that the coming step takes; None: all of it is cached."""
    return next(_prompt_parts(blocks, prompt_length), None)


def next_chunk(blocks: list[Block], prompt_length: int) -> Block | None:
    """The same, if another part waits after it."""
    parts = _prompt_parts(blocks, prompt_length)
    first, behind = next(parts, None), next(parts, None)
    return None if behind is None else first


def _prompt_parts(blocks: list[Block], prompt_length: int) -> Iterator[Block]:
    """Return the prompt's parts that are not cached yet."""
    own = itertools.takewhile(lambda block: block.end <= prompt_length, blocks)
    return (block for block in own if block.status is TO_CACHE)


def note_committed(blocks: list[Block]) -> None:
    """Note, after a pass over all that is not cached, that what waited for the cache is in it."""
    for block in reversed(blocks):
        if block.status is IN_CACHE:
            break
        if block.status is TO_CACHE:
            block.status = IN_CACHE


def num_masked_of(block: Block, is_masked_S: Bool) -> int:
    return int(is_masked_S[block.start : block.end].sum())
