"""Which tiles are worth timing: those whose programs stream the weight at one speed and end together.

What the search of many shapes has shown: programs should fill the multiprocessors once, or evenly a few times; each
should hold as many blocks in flight as its share of the shared memory has room for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from math import ceil

from lopa_cuda.tiles import (
    MOST_SHARED_BYTES,
    MOST_TILE_TOKENS,
    MOST_WIDE_TOKENS,
    WIDE_STEP,
    LinearConfig,
    LinearShape,
    Tile,
    WideConfig,
    impossible,
    shared_bytes,
    wide_layout,
)

MOST_CANDIDATES = 28  # for a shape and a number of tokens: each is compiled
_RESERVED_BYTES = 1500  # barriers and descriptors of a program
_MOST_STAGES, _LEAST_STAGES = 8, 3
_MOST_RESIDENT = 3  # programs of a multiprocessor at once, where there are more than fit
_MOST_SUMS = 128 * 288  # sums of a program that fit its registers
_WIDE_SUMS = 128 * 128  # from here on a program takes 8 warps, up to here 4
_FEWEST_PROGRAMS = 0.5  # a multiprocessor: fewer leave memory bandwidth unused
_MANY_WAVES = 3  # programs a multiprocessor that need not all be there at once, and no parts
_EVEN_WAVES = 4  # from so many programs a multiprocessor on, those that end late no longer matter
_USUAL_ROWS = {32: 0.97, 64: 1.0, 128: 0.98, 256: 0.94}
_SECOND_CHOICE = 0.8  # what a variant that seldom wins promises beside its first version

# The wide kernel takes over where few tokens end (lopa_cuda.wgmma).
_LEAST_WIDE_TOKENS, MOST_WIDE_CANDIDATES, MOST_CUT_CANDIDATES = 65, 14, 8  # cut: tiles of some of the tokens
_MANY_TOKENS_OF_TILE, MOST_MANY_CANDIDATES = (128, 192), 16  # for more tokens than a tile has at most
_SHARED_BYTES_A_CLOCK, _PRODUCTS_A_CLOCK = 128, 2048  # a multiprocessor; products in bf16
_MEMORY_BYTES_A_CLOCK = 19  # a multiprocessor's share
_SPLIT_CLOCKS, _EXCHANGED_BYTES_A_CLOCK = 2000, 24  # to add the splits' sums, of a multiprocessor
_PART_OF_CLUSTERS = 0.88  # share of the multiprocessors on which clusters of three and more find room

Case = tuple[LinearShape, int, Tile]  # int: tokens


def candidates(shape: LinearShape, num_tokens: int, multiprocessors: int, *, has_wide: bool = True) -> list[Tile]:
    """The most promising first: at most MOST_WIDE_CANDIDATES and MOST_CUT_CANDIDATES of the wide kernel, or
    MOST_MANY_CANDIDATES where no tile of it holds all tokens. At most MOST_CANDIDATES of Triton's, which has none where
    it would read the weight several times and the device runs the wide kernel. All can run."""
    wide = wide_candidates(shape, num_tokens, multiprocessors) if has_wide else []
    has_library_alone = has_wide and num_tokens > MOST_WIDE_TOKENS
    has_narrow = num_tokens <= MOST_TILE_TOKENS or not (wide or has_library_alone)
    return [*wide, *(_narrow(shape, num_tokens, multiprocessors) if has_narrow else ())]


def wide_candidates(shape: LinearShape, num_tokens: int, multiprocessors: int) -> list[WideConfig]:
    if num_tokens > MOST_WIDE_TOKENS:
        return _many_candidates(shape, num_tokens, multiprocessors)
    if num_tokens < _LEAST_WIDE_TOKENS:
        return []
    clocks: dict[WideConfig, float] = {}
    for rows, splits, tokens in product(range(32, 257, 8), range(1, 9), range(0, num_tokens, WIDE_STEP)):
        # Sharing activations was never faster; it lets more tokens than a box holds be fetched.
        tried = (WideConfig(rows, splits, tokens=tokens), WideConfig(rows, splits, share=2, tokens=tokens))
        config = next((config for config in tried if not impossible(shape, config, num_tokens)), None)
        if config is not None:
            clocks[config] = _wide_clocks(shape, config, num_tokens, multiprocessors)
    quickest = sorted(clocks, key=lambda config: (clocks[config], config))
    whole, cut = (tuple(config for config in quickest if bool(config.tokens) == is_cut) for is_cut in (False, True))
    # One of each kind: many numbers of rows make as many waves.
    unlike = {(config.splits, config.tokens): config for config in reversed(cut)}.values()
    return [*whole[:MOST_WIDE_CANDIDATES], *sorted(unlike, key=cut.index)[:MOST_CUT_CANDIDATES]]


def _many_candidates(shape: LinearShape, num_tokens: int, multiprocessors: int) -> list[WideConfig]:
    """The library's products of bf16 are faster there. Whether neighbours share activations decides little."""
    if shape.kind == "bf16":
        return []
    clocks: dict[WideConfig, float] = {}
    for rows, tokens, share in product(range(96, 257, 8), _MANY_TOKENS_OF_TILE, (1, 2)):
        config = WideConfig(rows, 1, share, tokens)
        if not impossible(shape, config, num_tokens):
            clocks[config] = _wide_clocks(shape, config, num_tokens, multiprocessors)
    return sorted(clocks, key=lambda config: (clocks[config], config))[:MOST_MANY_CANDIDATES]


def _wide_clocks(shape: LinearShape, config: WideConfig, num_tokens: int, multiprocessors: int) -> float:
    """Estimate its clocks: of memory, of the matrix unit and of shared memory, whichever is slowest."""
    layout = wide_layout(shape.kind, config, num_tokens, shape.num_in, shape.fusion == "swiglu")
    cluster, element = config.splits * config.share, 2 if shape.kind == "bf16" else 1
    room = multiprocessors * (_PART_OF_CLUSTERS if cluster > 2 else 1) // cluster
    parts = ceil(num_tokens / layout.tokens)
    groups = parts * ceil(shape.num_out / (config.rows * config.share))
    blocks = ceil(shape.num_in * element / layout.block_bytes / config.splits)
    read = layout.tokens * config.rows * (1 / layout.chunk + 1 / 64)  # rows of operands for all instructions of a block
    block_clocks = max(
        config.rows * layout.block_bytes / parts / _MEMORY_BYTES_A_CLOCK,
        layout.tokens * config.rows * layout.block_bytes / 2 / _PRODUCTS_A_CLOCK,
        (read + layout.tokens + config.rows) * layout.block_bytes / _SHARED_BYTES_A_CLOCK,
    )
    sent_bytes = 4 * layout.tokens * config.rows * (config.splits - 1) / config.splits
    exchange = _SPLIT_CLOCKS + sent_bytes / _EXCHANGED_BYTES_A_CLOCK if config.splits > 1 else 0
    return ceil(groups / room) * blocks * block_clocks + exchange


def _narrow(shape: LinearShape, num_tokens: int, multiprocessors: int) -> list[LinearConfig]:
    promise: dict[LinearConfig, float] = {}
    waves_of = {tile: _num_programs(shape, tile, num_tokens) / multiprocessors for tile in _blocks(shape, num_tokens)}
    fewest = min(_FEWEST_PROGRAMS, max(waves_of.values(), default=0) / 2)  # a small linear fills no device
    for narrow, waves in waves_of.items():
        if waves < fewest or (waves > _MANY_WAVES and narrow.splits > 1):
            continue
        balance = 1.0 if waves >= _EVEN_WAVES else waves / ceil(waves)
        for resident in range(1, _MOST_RESIDENT + 1) if waves > _MANY_WAVES else (ceil(waves),):
            for config, worth in _filled(shape, narrow, num_tokens, resident):
                promise[config] = max(balance * worth * _usual(config), promise.get(config, 0.0))
    return sorted(promise, key=lambda config: (-promise[config], config))[:MOST_CANDIDATES]


def _usual(config: LinearConfig) -> float:
    """Decide between tiles of one balance, by what has won more often."""
    return _USUAL_ROWS[config.block_c] * (0.95 if config.splits > 4 or config.swap else 1.0)


def _blocks(shape: LinearShape, num_tokens: int) -> Iterator[LinearConfig]:
    """Tiles with as few stages as pay."""
    is_gated, element = shape.fusion == "swiglu", 2 if shape.kind == "bf16" else 1
    splits = (1,) if is_gated else (1, 2, 3, 4, 7)
    tails = (0, 16) if is_gated and num_tokens > 32 else (0,)
    # The matrix unit's first dimension: tokens where they fill it, unless 8-bit weight rows do better.
    swaps = (False, True) if num_tokens > 64 and element == 1 and not is_gated else (False,)
    for block_c, row_bytes, split, tail, swap in product((32, 64, 128, 256), (128, 256), splits, tails, swaps):
        config = LinearConfig(block_c, row_bytes // element, split, _LEAST_STAGES, swap=swap, tail=tail)
        if _num_sums(shape, config, num_tokens) <= _MOST_SUMS and not impossible(shape, config, num_tokens):
            yield config


def _filled(
    shape: LinearShape, narrow: LinearConfig, num_tokens: int, resident: int
) -> Iterator[tuple[LinearConfig, float]]:
    """The tile with as many stages as the shared memory of so many programs holds, and with a few less; what each
    promises."""
    stage_bytes = shared_bytes(shape, narrow._replace(stages=1), num_tokens)
    most = min(_MOST_STAGES, (MOST_SHARED_BYTES // resident - _RESERVED_BYTES) // stage_bytes)
    num_sums = _num_sums(shape, narrow, num_tokens)
    for stages, worth in ((most, 1.0), (most - (1 if most < 6 else 2), _SECOND_CHOICE)):
        if stages >= _LEAST_STAGES:
            yield narrow._replace(stages=stages, warps=8 if num_sums > _WIDE_SUMS else 4), worth
            if _WIDE_SUMS <= num_sums <= 2 * _WIDE_SUMS:
                yield narrow._replace(stages=stages, warps=4 if num_sums > _WIDE_SUMS else 8), worth * _SECOND_CHOICE


def _num_sums(shape: LinearShape, config: LinearConfig, num_tokens: int) -> int:
    gates = 2 if shape.fusion == "swiglu" else 1
    return config.tile_tokens(num_tokens) * (config.block_c + config.tail) * gates


def _num_programs(shape: LinearShape, config: LinearConfig, num_tokens: int) -> int:
    columns = shape.num_out // (2 if shape.fusion == "swiglu" else 1)
    return ceil(columns / (config.block_c + config.tail)) * config.splits * ceil(num_tokens / MOST_TILE_TOKENS)


def distinct(cases: Iterable[Case]) -> list[Case]:
    """The first of those that are one kernel: numbers of tokens whose tiles are alike."""
    found: dict[tuple[object, ...], Case] = {}
    for case in cases:
        found.setdefault(_kernel_of(*case), case)
    return list(found.values())


def _kernel_of(shape: LinearShape, num_tokens: int, config: Tile) -> tuple[object, ...]:
    if isinstance(config, WideConfig):
        layout = wide_layout(shape.kind, config, num_tokens, shape.num_in, shape.fusion == "swiglu")
        return shape.kind, config, layout, shape.fusion
    return shape, config, config.tile_tokens(num_tokens), num_tokens % 16 == 0, num_tokens == 1
