"""Which skinny linears run on the Triton kernel, and with which tile: measured, not guessed.

One NVIDIA H200, torch 2.11.0+cu130, Triton 3.6.0, Dream-7B's shapes whole and a rank's share of them at tp 2 and 4, and
those of SDAR-8B and LLaDA-8B whole, up to 64 tokens: the
fastest of up to 20 tiles for each entry (`scripts/bench_kernels.py --tune`), timed with the stage behind it in captured
graphs over rotating weights, and only where it beat cuBLAS, `_int_mm` or `_scaled_mm`; in 8 bits up to 64 tokens at tp
1 the fastest in a whole step. Other shapes and more tokens go to the library.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Fusion = Literal["none", "swiglu"]  # what the linear's kernel computes behind the product


class LinearConfig(NamedTuple):
    block_c: int  # weight rows of a tile (SwiGLU: of gate and of up each)
    block_k: int
    splits: int
    stages: int
    warps: int = 4
    swap: bool = False  # weight rows on the matrix unit's first dimension, for few tokens
    tail: int = 0  # further rows of the tile, so that tiles divide evenly over the multiprocessors
    prefetch: int = 512  # bytes of each weight row pulled into L2 before the predecessor ends
    early: bool = False  # release the successor before the product instead of behind it


_QKV_8BIT = (64, LinearConfig(64, 256, 3, 3, early=True)), (128, LinearConfig(64, 128, 4, 3, swap=True))
_O_8BIT = (
    (32, LinearConfig(64, 256, 2, 5)),
    (64, LinearConfig(32, 256, 2, 4)),
    (128, LinearConfig(64, 128, 2, 8, swap=True)),
)
_GATE_UP_8BIT = (32, LinearConfig(64, 128, 1, 3)), (128, LinearConfig(128, 128, 1, 4, warps=8, tail=16))

Tiles = tuple[tuple[int, LinearConfig], ...]  # most tokens and configuration, ascending

# A rank's share, (output channels, input channels, fusion).
_SHARES_FP8: dict[tuple[int, int, Fusion], Tiles] = {
    (2304, 3584, "none"): (  # at tp 2
        (32, LinearConfig(64, 128, 4, 8)),
        (64, LinearConfig(32, 256, 2, 4)),
        (128, LinearConfig(32, 128, 4, 3)),
    ),
    (3584, 1792, "none"): (
        (32, LinearConfig(64, 128, 2, 8)),
        (64, LinearConfig(32, 256, 2, 4)),
        (128, LinearConfig(32, 128, 2, 5)),
    ),
    (18944, 3584, "swiglu"): ((32, LinearConfig(64, 128, 1, 5)), (64, LinearConfig(64, 128, 1, 4))),
    (3584, 9472, "none"): (
        (32, LinearConfig(64, 256, 4, 4)),
        (64, LinearConfig(32, 128, 2, 8)),
        (128, LinearConfig(64, 128, 4, 4)),
    ),
    (1152, 3584, "none"): ((128, LinearConfig(64, 128, 4, 8)),),  # at tp 4
    (3584, 896, "none"): ((32, LinearConfig(64, 128, 2, 8)), (128, LinearConfig(32, 128, 1, 8))),
    (9472, 3584, "swiglu"): ((32, LinearConfig(64, 128, 1, 8)), (64, LinearConfig(32, 128, 1, 7))),
    (3584, 4736, "none"): (
        (32, LinearConfig(64, 128, 2, 8)),
        (64, LinearConfig(32, 128, 2, 8)),
        (128, LinearConfig(64, 128, 4, 4)),
    ),
}
_SHARES_INT8: dict[tuple[int, int, Fusion], Tiles] = {
    **_SHARES_FP8,  # qkv and o at tp 4: the same tiles won, within 0.2 us
    (2304, 3584, "none"): (
        (32, LinearConfig(64, 128, 4, 8)),
        (64, LinearConfig(32, 256, 2, 4)),
        (128, LinearConfig(64, 256, 2, 4)),
    ),
    (3584, 1792, "none"): (
        (32, LinearConfig(64, 128, 2, 8)),
        (64, LinearConfig(32, 256, 1, 8)),
        (128, LinearConfig(32, 256, 1, 5)),
    ),
    (18944, 3584, "swiglu"): (
        (32, LinearConfig(64, 128, 1, 5)),
        (64, LinearConfig(128, 128, 1, 5)),
        (128, LinearConfig(64, 256, 1, 3, warps=8, tail=16)),
    ),
    (3584, 9472, "none"): (
        (32, LinearConfig(64, 256, 4, 4)),
        (64, LinearConfig(32, 256, 2, 4)),
        (128, LinearConfig(64, 256, 2, 4)),
    ),
    (9472, 3584, "swiglu"): (
        (32, LinearConfig(64, 256, 1, 5)),
        (64, LinearConfig(64, 256, 1, 4)),
        (128, LinearConfig(64, 256, 1, 3)),
    ),
    (3584, 4736, "none"): (
        (32, LinearConfig(64, 128, 2, 8)),
        (64, LinearConfig(32, 128, 2, 8)),
        (128, LinearConfig(64, 128, 2, 8)),
    ),
}

# (kind, output channels, input channels, fusion)
TABLE: dict[tuple[str, int, int, Fusion], Tiles] = {
    ("bf16", 4608, 3584, "none"): (
        (32, LinearConfig(64, 128, 2, 4, early=True)),
        (64, LinearConfig(128, 128, 3, 4, early=True)),
    ),
    ("bf16", 3584, 3584, "none"): ((32, LinearConfig(64, 128, 2, 8)), (128, LinearConfig(64, 64, 2, 8))),
    ("bf16", 37888, 3584, "swiglu"): (
        (32, LinearConfig(64, 64, 1, 3)),
        (64, LinearConfig(128, 64, 1, 4, tail=16)),
        (128, LinearConfig(128, 64, 1, 4, warps=8, tail=16)),
    ),
    ("bf16", 3584, 18944, "none"): (
        (32, LinearConfig(64, 128, 2, 7)),
        (64, LinearConfig(128, 128, 4, 4)),
        (128, LinearConfig(128, 64, 4, 7)),
    ),
    ("bf16", 152064, 3584, "none"): ((32, LinearConfig(64, 128, 1, 4)), (64, LinearConfig(64, 128, 1, 3))),
    # A rank's share at tp 2. gate/up of more than 64 tokens is the library's.
    ("bf16", 2304, 3584, "none"): (
        (32, LinearConfig(64, 128, 2, 8)),
        (64, LinearConfig(32, 128, 2, 4)),
        (128, LinearConfig(64, 64, 2, 8)),
    ),
    ("bf16", 3584, 1792, "none"): (
        (32, LinearConfig(64, 64, 2, 8)),
        (64, LinearConfig(32, 128, 1, 8)),
        (128, LinearConfig(32, 128, 1, 5)),
    ),
    ("bf16", 18944, 3584, "swiglu"): ((32, LinearConfig(64, 64, 1, 5)), (64, LinearConfig(64, 64, 1, 4))),
    ("bf16", 3584, 9472, "none"): (
        (32, LinearConfig(128, 128, 4, 5)),
        (64, LinearConfig(32, 128, 1, 8)),
        (128, LinearConfig(64, 64, 2, 8)),
    ),
    ("bf16", 76032, 3584, "none"): ((32, LinearConfig(64, 128, 1, 3)),),
    # At tp 4; down of more than 64 tokens is cuBLAS's.
    ("bf16", 1152, 3584, "none"): (
        (32, LinearConfig(64, 128, 4, 8)),
        (64, LinearConfig(32, 128, 2, 8)),
        (128, LinearConfig(64, 64, 4, 8)),
    ),
    ("bf16", 3584, 896, "none"): (
        (32, LinearConfig(64, 128, 2, 8)),
        (64, LinearConfig(32, 128, 1, 8)),
        (128, LinearConfig(32, 128, 1, 5)),
    ),
    ("bf16", 9472, 3584, "swiglu"): (
        (32, LinearConfig(64, 128, 1, 5)),
        (64, LinearConfig(64, 128, 1, 4)),
        (128, LinearConfig(64, 64, 1, 7)),
    ),
    ("bf16", 3584, 4736, "none"): ((32, LinearConfig(64, 128, 2, 8)), (64, LinearConfig(32, 128, 1, 8))),
    ("bf16", 38016, 3584, "none"): ((64, LinearConfig(128, 64, 1, 3)),),
    # SDAR-8B: qkv, o, down, head; o and down are LLaDA-8B's too, whose qkv and head follow. gate/up is the library's.
    ("bf16", 6144, 4096, "none"): ((32, LinearConfig(64, 128, 4, 3)), (64, LinearConfig(32, 128, 2, 3))),
    ("bf16", 4096, 4096, "none"): ((32, LinearConfig(64, 128, 2, 8)), (64, LinearConfig(32, 128, 2, 4))),
    ("bf16", 4096, 12288, "none"): ((32, LinearConfig(64, 128, 4, 4)), (64, LinearConfig(128, 128, 4, 4))),
    ("bf16", 151936, 4096, "none"): ((32, LinearConfig(128, 64, 1, 5)), (64, LinearConfig(256, 64, 1, 5))),
    ("bf16", 12288, 4096, "none"): ((32, LinearConfig(64, 64, 2, 6)), (64, LinearConfig(64, 64, 2, 4))),
    ("bf16", 126464, 4096, "none"): ((32, LinearConfig(256, 128, 1, 3)), (64, LinearConfig(256, 64, 1, 5))),
    ("fp8", 4608, 3584, "none"): ((32, LinearConfig(64, 128, 2, 7, early=True)), *_QKV_8BIT),
    ("fp8", 3584, 3584, "none"): _O_8BIT,
    ("fp8", 37888, 3584, "swiglu"): (
        _GATE_UP_8BIT[0],
        (64, LinearConfig(128, 128, 1, 4, tail=16)),
        _GATE_UP_8BIT[1],
    ),
    ("fp8", 3584, 18944, "none"): (
        (32, LinearConfig(64, 256, 2, 5)),
        (64, LinearConfig(64, 256, 4, 3)),
        (128, LinearConfig(64, 128, 4, 4, swap=True)),
    ),
    # int8 was searched up to 64 tokens; between 65 and 128 it takes fp8's tiles, as both move the same bytes.
    ("int8", 4608, 3584, "none"): ((32, LinearConfig(128, 256, 3, 4, early=True)), *_QKV_8BIT),
    ("int8", 3584, 3584, "none"): _O_8BIT,
    ("int8", 37888, 3584, "swiglu"): _GATE_UP_8BIT,
    ("int8", 3584, 18944, "none"): ((64, LinearConfig(64, 256, 2, 5)), (128, LinearConfig(64, 128, 4, 4, swap=True))),
    **{("fp8", *share): tiles for share, tiles in _SHARES_FP8.items()},
    **{("int8", *share): tiles for share, tiles in _SHARES_INT8.items()},
}


def find_config(kind: str, num_out: int, num_in: int, num_tokens: int, fusion: Fusion) -> LinearConfig | None:
    """The kernel's configuration for this linear, or None where the library is faster."""
    for most_tokens, config in TABLE.get((kind, num_out, num_in, fusion), ()):
        if num_tokens <= most_tokens:
            return config
    return None
