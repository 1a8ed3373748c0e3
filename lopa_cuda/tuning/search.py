"""The search for one linear's tile at one number of tokens, and its outcome. Timing is a function that is passed in.

    candidates -> one short timing each -> the fastest few and the library, in turn, several rounds -> a tile or none

A tile is kept where its slowest round beats the library's fastest by more than a graph that is captured twice differs
from itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lopa_cuda.tiles import ModelLinear, Tile, WideConfig

# A step captured twice differs by up to 0.5 % from itself (docs/kernels.md).
NOISE = 0.005
NUM_FINALISTS, NUM_ROUNDS = 3, 3
SHORT_REPLAYS, ROUND_REPLAYS = 5, 15


# (tile, replays) -> microseconds, of the library's product where the tile is None; None where the device cannot.
Timer = Callable[[Tile | None, int], float | None]


@dataclass(frozen=True, slots=True)
class Choice:
    """config: the tile that is kept; None: the library's product. best: the fastest tile that is right, kept or not,
    with its us. has_tiles: whether there was one to time."""

    num_tokens: int
    config: Tile | None
    library_us: float
    best: Tile | None
    best_us: float
    has_tiles: bool = True

    def __str__(self) -> str:
        if self.best is None:
            why = "no tile fits this device" if self.has_tiles else "no tile to try"
            return f"{self.num_tokens} tokens: library {self.library_us:.1f} us, {why}"
        gain = self.library_us / self.best_us
        tile = f"tile {_words(self.best)} {self.best_us:.1f} us, library {self.library_us:.1f} us, {gain:.2f} x"
        return f"{self.num_tokens} tokens: {tile}" + ("" if self.config else ": the library is kept")


def choose(tiles: Sequence[Tile], num_tokens: int, time: Timer, is_right: Callable[[Tile], bool]) -> Choice:
    """is_right: whether a tile computes what the library does; one that does not is no choice."""
    short = [(us, config) for config in tiles if (us := time(config, SHORT_REPLAYS)) is not None]
    finalists = [config for _, config in sorted(short, key=lambda found: found[0])[:NUM_FINALISTS] if is_right(config)]
    rounds: dict[Tile | None, list[float]] = {config: [] for config in (None, *finalists)}
    for _ in range(NUM_ROUNDS):  # in turn: a clock that drifts does so for all
        for config, times in rounds.items():
            us = time(config, ROUND_REPLAYS)
            assert us is not None, "the library and what has been timed before run"
            times.append(us)
    library = rounds.pop(None)
    library_us = statistics.median(library)
    if not rounds:
        return Choice(num_tokens, None, library_us, None, library_us, has_tiles=len(tiles) > 0)
    best = min(rounds, key=lambda config: statistics.median(rounds[config]))
    is_faster = max(rounds[best]) < min(library) * (1 - NOISE)
    return Choice(num_tokens, best if is_faster else None, library_us, best, statistics.median(rounds[best]))


def title(linear: ModelLinear) -> str:
    return f"{linear.name} {linear.shape}"


def _words(config: Tile) -> str:
    """`128x128 in 3 parts, 4 stages, tail 16`: weight rows by input channels, and what is not as usual."""
    if isinstance(config, WideConfig):
        tokens = f" of {config.tokens} tokens" if config.tokens else ""
        words = [f"wide, {config.rows} rows{tokens}" + (f" in {config.splits} parts" if config.splits > 1 else "")]
        return ", ".join([*words, *([f"share {config.share}"] if config.share > 1 else [])])
    words = [f"{config.block_c}x{config.block_k}"]
    words[0] += f" in {config.splits} parts" if config.splits > 1 else ""
    words.append(f"{config.stages} stages")
    usual = config._field_defaults
    given = {name: value for name, value in config._asdict().items() if name in usual and value != usual[name]}
    return ", ".join([*words, *(name if value is True else f"{name} {value}" for name, value in given.items())])
