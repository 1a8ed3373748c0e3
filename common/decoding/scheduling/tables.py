"""The state of the requests being decoded: tables with one row a slot, read and written by compiled loops.

Tables of which a request's part depends on its length lie in `Rooms`: one array for all slots, in which a slot has a
stretch as long as its request needs. Shapes: P positions of a request, B blocks, K lookaheads, F fills of a branch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from common.compiled import Records, compiled, inlined, records
from common.decoding.plan import Bool, Float, Int, Score
from common.policies.settings import SETTINGS

ACTIVE, TO_CACHE, IN_CACHE = range(3)
# ACTIVE: holds masks, waits for a block before it that does, or is still edited. TO_CACHE: finished; the next forward
# writes its final KV. IN_CACHE: its KV is final.

BLOCK = np.dtype(
    [
        ("start", np.int32), ("end", np.int32), ("num_masked", np.int32), ("status", np.int32),
        ("is_activated", np.bool_),  # has to fill at least one position a step
        ("num_steps", np.int32),  # that could fill it
        ("num_edit_steps", np.int32),  # of these, steps that began without a mask
        ("num_waits", np.int32),  # passes that it has waited for the cache (`cache_delay`)
    ],
    align=True,
)  # fmt: skip
SPAN = np.dtype(  # positions that a step may fill: a block, a part of one, or (block NOWHERE) several
    [
        ("start", np.int32), ("end", np.int32), ("num_masked", np.int32), ("block", np.int32),
        ("is_activated", np.bool_), ("num_steps", np.int32),
    ],
    align=True,
)  # fmt: skip
ORIGIN = np.dtype(  # of a token: the pass that predicted it, counted from 1 (0: none did), and the entry in that pass
    [("step", np.int32), ("entry", np.int32)], align=True
)
FILL = np.dtype(
    [("position", np.int32), ("token", np.int32), ("step", np.int32), ("entry", np.int32)],  # the latter its origin
    align=True,
)
BRANCH = np.dtype(
    [
        # A lookahead is the anchor and these fills, the anchor, after the lookaheads, has none.
        ("num_fills", np.int32), ("confidence", np.float32),
        ("origin", np.int32),  # the code of the spawn rule that made it
        # In the step under way.
        ("opens", np.bool_),  # a block
        ("row_end", np.int32), ("masks_end", np.int32),  # of its window, and of blocks that it has opened there
    ],
    align=True,
)  # fmt: skip
STEP = np.dtype([("tokens", np.int32), ("rows", np.int32), ("winner", np.int32), ("window", np.int32)], align=True)
DRAFT = np.dtype(  # a position of a block that is revised, in the order of `strategies.revising`
    [
        ("input", np.int32),  # what stood there when the pass began
        ("entry", np.int32),  # of the winner's row, that predicts it
        ("input_step", np.int32), ("input_entry", np.int32),  # its origin
        ("token", np.int32), ("confidence", np.float32),  # what is predicted
        ("written", np.int32),  # what is written, if `writes`
        ("scanned", np.int32),  # what stands there after the scan, and its origin
        ("scanned_step", np.int32), ("scanned_entry", np.int32),
        ("is_masked", np.bool_), ("is_first", np.bool_), ("is_runner_up", np.bool_), ("writes", np.bool_),
        ("has_escaped", np.bool_), ("scanned_is_first", np.bool_),
    ],
    align=True,
)  # fmt: skip
GOES_ON, RESTS, IS_SPENT = range(3)
# What becomes of such a block. RESTS: its tokens are final. IS_SPENT: also, and a pass of its own writes its KV.
NOWHERE = -1
_LEAST_PLACES = 1024  # of Rooms
_FIRSTS = ("first_position", "first_block", "first_step", "first_memory")

STATE = np.dtype(
    [
        # What stays as it is from admission on.
        ("slot", np.int32), ("noise_key", np.int64), ("prompt_length", np.int32), ("num_positions", np.int32),
        ("shift", np.int32),  # 1: a position is predicted by the entry before it; 0: by its own
        ("origin", np.int32),  # where blocks are counted from
        ("canvas_end", np.int32),  # where the last block ends
        ("room_blocks", np.int32),  # of prompt and canvas: what the table of blocks has places for
        ("chunk", np.int32),  # positions of a prompt that a pass takes; 0: any number
        ("canvas_block", np.int32),  # positions of a block, of `vanilla` the whole canvas
        ("most_steps", np.int32), ("num_ends", np.int32), ("keeps_carry", np.bool_), ("has_stops", np.bool_),
        ("first_position", np.int64), ("first_block", np.int64), ("first_step", np.int64),  # its stretches in Rooms
        ("first_memory", np.int64),
        ("mask_token", np.int32), ("delete_token", np.int32), ("split_token", np.int32),  # of revisions
        # What the steps so far have come to.
        ("num_blocks", np.int32), ("num_lookaheads", np.int32), ("num_forwards", np.int32), ("num_wins", np.int32),
        ("num_skipped", np.int32),  # passes of the prompt that a cached prefix has saved; random numbers count them
        ("num_forced", np.int32), ("num_given", np.int32), ("has_eos", np.bool_),
        ("score_variance", np.float64),  # of the last pass's lookaheads; infinite where there were less than two
        ("is_refreshed", np.bool_),  # fast_dllm: the cache around the current block is up to date
        ("has_block_cache", np.bool_),  # fast_dllm_v2, dual: keys of the block's other parts are there
        # levenshtein: the block's masks when it was opened, passes without one of these; and of the last pass the least
        # that it filled, what became of the block, whether it had to, moved tokens, and led back to one seen before.
        ("first_masks", np.int32), ("num_post", np.int32), ("quota", np.int32), ("outcome", np.int32),
        ("is_final", np.bool_), ("has_moved", np.bool_), ("repeats", np.bool_),
        # What is predicted for the first position after the cache, kept from the step that committed the one before.
        ("carry_token", np.float32), ("carry_probability", np.float32), ("carry_confidence", np.float32),
        ("carry_step", np.int32), ("carry_entry", np.int32),  # its origin
        # The step under way: positions [window_start, window_end) beside cached keys up to window_cached.
        ("window_start", np.int32), ("window_end", np.int32), ("window_cached", np.int32),
        ("commit_length", np.int32),  # the first so many become final
        ("next_start", np.int32),  # where the next step's window begins; its first position is predicted from this one
        ("predicts_next", np.bool_),  # the position after the window too, which begins the next block
        ("is_tentative", np.bool_),  # what is committed differs by branch, and is written over later
        ("widest_end", np.int32),  # of a row that opens a block
        ("winner_first", np.int32), ("winner_keys", np.int32),  # the winner's entries
        ("num_shift_entries", np.int32), ("first_row", np.int32), ("num_rows", np.int32), ("num_entries", np.int32),
    ],
    align=True,
)  # fmt: skip


class Tables(NamedTuple):
    """What the loops are given. Rows are slots, unless the first index is said to be into `Rooms` or scratch.

    token_P, is_masked_P, origin_P, draw_P (Rooms): the prompt, the anchor's tokens, masks, and where tokens come from,
        by position; random numbers of rules that draw. A token that moves takes its origin along, and with it what is
        kept by origin. is_first_P (Rooms): of a block that is revised, tokens that were masks when it was opened or
        stand for such. block_B, step_B (Rooms): blocks, and what each step did. seen_S, tried_S (Rooms): digests of
        blocks that its passes have seen or written, and what was written where, if that matters.
    ends_E: end tokens. shift_positions_B: positions that a shift entry predicts.
    spans, edits, winner_3W ... (scratch): of the request that is looked at. winner_3W, aligned_3W: what the winner, and
        another row, predict for each position of the window.
    """

    states: Records
    settings: Records
    branches_K: Records
    fills_KF: Records
    score_draw_K: Score
    ends_E: Int
    shift_positions_B: Int
    token_P: Int
    is_masked_P: Bool
    origin_P: Records
    is_first_P: Bool
    draw_P: Score
    block_B: Records
    step_B: Records
    seen_S: Int
    tried_S: Int
    drafts: Records
    spans: Records
    edits: Records
    winner_3W: Float
    aligned_3W: Float
    position_M: Int
    probability_M: Float
    confidence_M: Float
    agreed_M: Score
    rank_M: Score
    is_chosen_M: Bool
    order_M: Int
    chosen_K: Int


Parts = tuple[Any, ...]  # of Tables: as a plain tuple they pass into a compiled function in half the time


class Request(NamedTuple):
    """A slot's parts of the tables, in their own indices."""

    state: Any
    settings: Any
    token_P: Any
    is_masked_P: Any
    origin_P: Any
    is_first_P: Any
    block_B: Any


@inlined
def request_of(tables: Tables, slot: int) -> Request:
    """Return the slot's parts; a block more than there are, so that one may be added."""
    state = tables.states[slot]
    first, end = state.first_position, state.first_position + state.num_positions
    return Request(
        state,
        tables.settings[slot],
        tables.token_P[first:end],
        tables.is_masked_P[first:end],
        tables.origin_P[first:end],
        tables.is_first_P[first:end],
        tables.block_B[state.first_block : state.first_block + state.room_blocks],
    )


@compiled
def is_end(tables: Tables, state: Any, token: int) -> bool:
    """Return whether the token ends a text of the request."""
    for place in range(state.num_ends):  # noqa: SIM110 - numba takes no generator
        if tables.ends_E[state.slot, place] == token:
            return True
    return False


def positions_of(tables: Tables, slot: int) -> tuple[Int, Bool]:
    """Return the slot's tokens and masks by position, for Python: numba hands records out as copies."""
    first = int(tables.states[slot]["first_position"])
    own = slice(first, first + int(tables.states[slot]["num_positions"]))
    return tables.token_P[own], tables.is_masked_P[own]


class Rooms:
    """Arrays in which every slot has a stretch of its own length, one after another, with room for more at the end.

    A slot takes its last stretch again where that is long enough. Stretches move when the arrays are made anew, which
    happens where one more does not fit, and where three quarters stand empty: so the memory of all follows what all
    need together.
    """

    def __init__(self, dtypes: dict[str, np.dtype[Any]], num_slots: int) -> None:
        self._dtypes = dtypes
        self.first_N = np.zeros(num_slots, np.int64)
        self._length_N = np.zeros(num_slots, np.int64)  # 0: the slot is free
        self._room_N = np.zeros(num_slots, np.int64)  # of its stretch
        self._end = 0
        self.arrays = {name: records_or_plain(np.zeros(_LEAST_PLACES, dtype)) for name, dtype in dtypes.items()}

    @property
    def num_places(self) -> int:
        """Places of each array, empty ones included."""
        return len(next(iter(self.arrays.values())))

    def take(self, slot: int, length: int) -> bool:
        """Give the slot a stretch of at least so many places; True where all stretches have moved."""
        self._length_N[slot] = length
        num_wanted = int(self._length_N.sum())
        if self.num_places > _LEAST_PLACES and 4 * num_wanted < self.num_places:
            self._make(2 * num_wanted)
            return True
        if self._room_N[slot] >= length:
            return False
        moves = self._end + length > self.num_places
        if moves:
            self._make(2 * num_wanted)
        else:
            self.first_N[slot], self._room_N[slot] = self._end, length
            self._end += length
        return moves

    def give(self, slot: int) -> None:
        """Take the slot's stretch back."""
        self._length_N[slot] = 0

    def _make(self, num_places: int) -> None:
        old, end = self.arrays, 0
        num_places = max(num_places, _LEAST_PLACES)
        self.arrays = {name: records_or_plain(np.zeros(num_places, dtype)) for name, dtype in self._dtypes.items()}
        for slot in self.first_N.argsort(kind="stable").tolist():
            first, length = int(self.first_N[slot]), int(self._length_N[slot])
            held = min(length, int(self._room_N[slot]))
            for name, array in self.arrays.items():
                array[end : end + held] = old[name][first : first + held]
            self.first_N[slot], self._room_N[slot] = end, length
            end += length
        self._end = end


def records_or_plain(array: Any) -> Any:
    """Return the array in the form that loops write."""
    return records(array) if array.dtype.names else array


def _grown(array: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return the array, or a larger one that holds the same where it has too few places; None: one of zeros."""
    if array is not None and array.shape == shape:
        return array
    larger = np.zeros(shape, dtype)
    if array is not None:
        larger[tuple(map(slice, array.shape))] = array
    return records_or_plain(larger)


class Sizes(NamedTuple):
    """What a request needs places for, or the most that any has needed."""

    num_positions: int = 1
    num_blocks: int = 1
    num_lookaheads: int = 1
    num_ends: int = 1
    num_shifts: int = 1
    num_columns: int = 1  # of a block that is revised
    num_fills: int = 1  # of a lookahead


def _shapes(num_slots: int, sizes: Sizes) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return type and shape of the tables that are not `Rooms`, by name."""
    num_positions, num_blocks, k, num_ends, num_shifts, num_columns, num_fills = sizes
    return {
        "states": (STATE, (num_slots,)),
        "settings": (SETTINGS, (num_slots,)),
        "branches_K": (BRANCH, (num_slots, k + 1)),
        "fills_KF": (FILL, (num_slots, k, num_fills)),
        "score_draw_K": (np.float64, (num_slots, k + 1)),
        "ends_E": (np.int64, (num_slots, num_ends)),
        "shift_positions_B": (np.int64, (num_slots, num_shifts)),
        "spans": (SPAN, (num_blocks + 1,)),
        "drafts": (DRAFT, (num_columns,)),
        "edits": (FILL, (num_positions,)),
        "winner_3W": (np.float32, (3, num_positions + 1)),
        "aligned_3W": (np.float32, (3, num_positions + 1)),
        "position_M": (np.int64, (num_positions,)),
        "probability_M": (np.float32, (num_positions,)),
        "confidence_M": (np.float32, (num_positions,)),
        "agreed_M": (np.float64, (num_positions,)),
        "rank_M": (np.float64, (num_positions + 1,)),
        "is_chosen_M": (np.bool_, (num_positions,)),
        "order_M": (np.int64, (num_positions,)),
        "chosen_K": (np.int64, (k,)),
    }


class TableStore:
    """The tables of `num_slots` requests: admits, drops, and grows them.

    loops: what the compiled loops are given, `parts` as a plain tuple; other objects after `admit`.
    """

    def __init__(self, num_slots: int) -> None:
        self.positions = Rooms(
            {
                "token_P": np.dtype(np.int64),
                "is_masked_P": np.dtype(np.bool_),
                "origin_P": ORIGIN,
                "is_first_P": np.dtype(np.bool_),
                "draw_P": np.dtype(np.float64),
            },
            num_slots,
        )
        self.blocks = Rooms({"block_B": BLOCK}, num_slots)
        self.steps = Rooms({"step_B": STEP}, num_slots)
        self.memories = Rooms({"seen_S": np.dtype(np.int64), "tried_S": np.dtype(np.int64)}, num_slots)
        self._num_slots = num_slots
        self._sizes = Sizes()
        self._tables: dict[str, Any] = {}
        self._grow()

    def admit(self, slot: int, sizes: Sizes, num_steps: int, num_remembered: int = 0) -> None:
        """Make room for a request in a slot; its state is zeros but for where its stretches lie. num_remembered: what
        revising a block has to remember."""
        has_moved = self.positions.take(slot, sizes.num_positions)
        has_moved |= self.blocks.take(slot, sizes.num_blocks)
        has_moved |= self.steps.take(slot, num_steps)
        if num_remembered:
            has_moved |= self.memories.take(slot, num_remembered)
        largest = Sizes(*map(max, sizes, self._sizes))
        if has_moved or largest != self._sizes:
            self._sizes = largest
            self._grow()
        states = self.loops.states
        states[slot] = np.zeros((), STATE)
        for name, rooms in zip(_FIRSTS, self._rooms, strict=True):
            states[name] = rooms.first_N

    def _grow(self) -> None:
        """Give the tables places for requests of these sizes; what they hold stays where it is."""
        for name, (dtype, shape) in _shapes(self._num_slots, self._sizes).items():
            self._tables[name] = _grown(self._tables.get(name), dtype, shape)
        rooms = {name: array for rooms in self._rooms for name, array in rooms.arrays.items()}
        self.loops = Tables(**self._tables, **rooms)
        self.parts: Parts = tuple(self.loops)

    def drop(self, slot: int) -> None:
        """Give the slot's room back."""
        for rooms in self._rooms:
            rooms.give(slot)

    @property
    def _rooms(self) -> tuple[Rooms, ...]:
        return self.positions, self.blocks, self.steps, self.memories
