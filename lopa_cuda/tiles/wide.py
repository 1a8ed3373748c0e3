"""Tiles of the linears of 65 tokens and more (`lopa_cuda.wgmma`), and how such a tile lies on a multiprocessor."""

from __future__ import annotations

from typing import NamedTuple

MOST_WIDE_TOKENS = 320
MOST_CLUSTER = 8  # programs, on every device
BLOCK_BYTES = 128  # every row's in a stage: the widest swizzle
MOST_CUT_TOKENS = 256  # in a tile of some of the tokens: what one fetch brings
WIDE_STEP = 64  # tokens of the matrix unit's first dimension
_MOST_STAGES, _LEAST_STAGES = 8, 3
# Shared memory of a program on Hopper and Blackwell data centre parts, which is the most that any device has.
MOST_SHARED_BYTES = 227 * 1024
FETCHING_REGISTERS = 40  # a thread that fetches
_OTHER_REGISTERS = 32  # a thread, beside its sums
_MOST_UNIT_CHANNELS = 4096
_UNIT_BLOCKS = 8  # after which sums of more channels move out of the matrix unit
# Warpgroups and tiles of each, by 64 tokens. Five warpgroups leave a thread few registers, four of two tiles more.
_WARPGROUPS = {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 2), 5: (5, 1)}


class WideConfig(NamedTuple):
    """rows: of the weight in a tile, of gate and of up together. splits: programs that share a tile's depth. share:
    programs of neighbouring tiles that fetch activations for each other. tokens: of a tile; 0: all."""

    rows: int
    splits: int = 1
    share: int = 1
    tokens: int = 0


class WideLayout(NamedTuple):
    """warpgroups: that multiply, `tiles` of 64 tokens each. chunk: weight rows of an instruction. unit_blocks: of
    the depth, after which sums move out of the matrix unit; 0: never. is_giving: whether the others need registers of
    a whole warpgroup that fetches. columns: of the output in a tile."""

    warpgroups: int
    tiles: int
    chunk: int
    unit_blocks: int
    is_giving: bool
    stages: int
    columns: int
    shared_bytes: int
    block_bytes: int = BLOCK_BYTES

    @property
    def tokens(self) -> int:
        return WIDE_STEP * self.warpgroups * self.tiles

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.is_giving else 32)


def wide_layout(kind: str, config: WideConfig, num_tokens: int, depth: int, is_gated: bool) -> WideLayout:
    """depth: input channels. Raises ValueError for what cannot run, in words."""
    rows = config.rows
    step = 16 if is_gated or kind == "int8" else 8
    if rows % step or not 16 <= rows <= 256:
        raise ValueError(f"{rows} rows: the matrix unit takes 16 to 256 in steps of {step}")
    if config.tokens % WIDE_STEP:
        raise ValueError(f"{config.tokens} tokens of a tile: they come in steps of {WIDE_STEP}")
    num_tokens = min(num_tokens, config.tokens or num_tokens)
    if not 1 <= num_tokens <= MOST_WIDE_TOKENS:
        raise ValueError(f"{num_tokens} tokens: a tile has at most {MOST_WIDE_TOKENS} unless `tokens` cuts them")
    if config.splits * config.share > MOST_CLUSTER:
        raise ValueError(f"a cluster of {config.splits * config.share} programs: at most {MOST_CLUSTER}")
    warpgroups, tiles = _WARPGROUPS[-(-num_tokens // WIDE_STEP)]
    part = WIDE_STEP * warpgroups * tiles // config.share
    if part % 8 or part > 256:
        raise ValueError(f"{part} tokens of each of {config.share} programs that share: at most 256, in steps of 8")
    is_moving = kind == "fp8" and not stays_in_unit(depth, config.splits)
    unit_blocks = _UNIT_BLOCKS if is_moving else 0
    chunk, is_giving = _chunk(kind, rows, warpgroups, tiles, 2 if is_moving else 1)
    stage_bytes = (WIDE_STEP * warpgroups * tiles + rows) * BLOCK_BYTES
    stages = min(_MOST_STAGES, (MOST_SHARED_BYTES - 1024) // (stage_bytes + 16))
    if stages < _LEAST_STAGES:
        raise ValueError(f"{stages} stages of {stage_bytes} bytes fit, {_LEAST_STAGES} are needed")
    gates = 2 if is_gated else 1
    units = -(-rows * tiles // (4 * gates) // config.splits) * config.splits * gates  # pairs of sums of a thread
    if config.splits > 1 and 8 * units * 128 * warpgroups > stages * stage_bytes:
        raise ValueError(f"the sums of {config.splits} splits do not fit {stages} stages of {stage_bytes} bytes")
    columns = rows // 2 if is_gated else rows
    shared = stages * (stage_bytes + 16) + 1024
    return WideLayout(warpgroups, tiles, chunk, unit_blocks, is_giving, stages, columns, shared)


def stays_in_unit(depth: int, splits: int = 1) -> bool:
    """Whether a float8 sum over a split of so many input channels is left to the matrix unit, which adds in about 14
    bits, until it is whole (docs/kernels.md "Sums of float8")."""
    return depth <= _MOST_UNIT_CHANNELS * splits


def _chunk(kind: str, rows: int, warpgroups: int, tiles: int, copies: int) -> tuple[int, bool]:
    """Rows of an instruction and whether registers are given: the most that registers hold, of so many copies of the
    sums."""
    at_start = min(240, 65536 // (128 * (warpgroups + 1)) // 8 * 8)
    pool = at_start * (warpgroups + 1) - FETCHING_REGISTERS
    sums, step = copies * tiles * rows // 2 + _OTHER_REGISTERS, 16 if kind == "int8" else 8
    for registers, is_giving in ((at_start, False), (min(240, pool // warpgroups // 8 * 8), True)):
        for chunk in (chunk for chunk in range(rows, 15, -step) if rows % chunk == 0):
            # An instruction's have to fit at the start, whatever a warpgroup gets later.
            if chunk // 2 + _OTHER_REGISTERS <= at_start and sums <= registers:
                return chunk, is_giving
    raise ValueError(f"the sums of {rows} rows do not fit {warpgroups} warpgroups' registers")
