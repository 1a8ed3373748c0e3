"""Ways of decoding among which the load chooses: what the run key `pace` stands for.

A pipeline over full attention (`d2f`) gets lookaheads, their guard, and where blocks wait for each other; every other
strategy keeps its own rules and gets a number of lookaheads. docs/results/pace.json says what each way costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from common.config.decode import DecodeConfig

Pace = Literal["fixed", "careful", "balanced", "fast"]


class Way(NamedTuple):
    """A way to decode a request. tokens, entries: those that a pass brings and computes, before the run's own requests
    have told."""

    name: str
    decode: DecodeConfig
    tokens: float
    entries: float


class _Way(NamedTuple):
    """opens: `block_add_threshold`. parts: into which a block is cut. entropy: that a lookahead may leave before it, in
    nats. tokens, entries: means over the study's math and code problems, blocks of 16."""

    num_lookahead: int
    entropy: int
    opens: float
    parts: int
    tokens: float
    entries: float


_WAYS = {
    "k7": _Way(7, 8, 0.1, 1, 9.5, 220),
    "k3": _Way(3, 8, 0.1, 1, 9.5, 159),
    "k2": _Way(2, 4, 0.1, 1, 8.4, 110),
    "k2_in_turn": _Way(2, 4, 1.0, 1, 6.1, 49),
    "k2_short": _Way(2, 4, 0.6, 2, 5.5, 35),
    "k1_soon": _Way(1, 4, 0.5, 1, 7.3, 63),
    "k0_soon": _Way(0, 4, 0.5, 1, 3.1, 30),
    "k0_in_turn": _Way(0, 4, 1.0, 2, 2.6, 12),
}
# Held against k0_in_turn over the 1,000 problems of docs/results/wall_clock_h100.json, a way of `careful` loses at most
# a point of either kind, one of `balanced` at most a point of all, and one of `fast` at most three of all.
_PACES: Mapping[str, tuple[str, ...]] = {
    "careful": ("k7", "k0_soon", "k0_in_turn"),
    "balanced": ("k3", "k0_soon", "k0_in_turn"),
    "fast": ("k3", "k2", "k2_in_turn", "k2_short", "k1_soon", "k0_soon", "k0_in_turn"),
}
_NUMBERS_OF_LOOKAHEADS = {"careful": (7, 3, 0), "balanced": (3, 1, 0), "fast": (3, 1, 0)}
_GROWTH = 0.4  # n branches bring about n^0.4 times the tokens of one


def paced(decode: DecodeConfig, pace: Pace) -> DecodeConfig:
    """Return the settings of a run of this pace: its first way, which has the most lookaheads."""
    return decode if pace == "fixed" else ways_of(decode, pace)[0].decode


def ways_of(decode: DecodeConfig, pace: Pace) -> tuple[Way, ...]:
    """Return the ways of decoding a request of these settings; those with more lookaheads first, none for `fixed`."""
    if pace == "fixed":
        return ()
    if decode.strategy.name != "d2f" or decode.window_attention != "full":
        return tuple(_with_lookaheads(decode, count) for count in _NUMBERS_OF_LOOKAHEADS[pace])
    return tuple(_pipelined(decode, name) for name in _PACES[pace])


def _with_lookaheads(decode: DecodeConfig, count: int) -> Way:
    more = (count + 1) ** _GROWTH
    changed = decode.model_copy(update={"num_lookahead": count})
    return Way(f"k{count}", changed, 4 * more, 2 * decode.block_size * (count + 1))


def _pipelined(decode: DecodeConfig, name: str) -> Way:
    own, size = _WAYS[name], decode.block_size
    settings = {
        "num_lookahead": own.num_lookahead, "block_add_threshold": own.opens,
        "block_size": size // own.parts if size % own.parts == 0 else size,
        "spawn_rule": f"near(probability=0.2, entropy={own.entropy})", "branch_score": "hedged(risk=1)",
        "lookahead_rule": "all", "fill_rule": "threshold", "skip_threshold": 0.98, "shift_row": "fresh",
        "sampling_strategy": "neg_entropy",
    }  # fmt: skip
    return Way(name, decode.model_copy(update=settings), own.tokens, own.entries * size / 16)


def is_paced(decode: DecodeConfig, of_run: DecodeConfig) -> bool:
    """Return whether a request leaves its pace to a run of these settings: it sets nothing that ways differ in."""
    return all(getattr(decode, name) == getattr(of_run, name) for name in _OF_PACE)


_OF_PACE = (
    "strategy", "num_lookahead", "block_size", "block_add_threshold", "decoded_token_threshold", "skip_threshold",
    "spawn_rule", "branch_score", "lookahead_rule", "fill_rule", "shift_row",
)  # fmt: skip
