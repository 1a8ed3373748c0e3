"""The search for the skinny linears' tiles, whose winners stand in configs/tiles."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import product
from multiprocessing import get_context

import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from lopa_cuda.kernels.linear import launch_linear
from lopa_cuda.tiles import LinearConfig

from .inputs import SHAPES, linear_shapes, make_input, make_weight
from .linears import library_us, linear_pair, linears_of


def candidates(name: str, kind: str, num_tokens: int) -> Iterator[LinearConfig]:
    """Tiles whose programs all fit on the device at once, or nearly: they then stream at one speed and end together."""
    element, gates = (2 if kind == "bf16" else 1), (2 if name == "gate_up" else 1)
    block_t = max(16, triton.next_power_of_2(num_tokens))
    num_out = SHAPES[name][0] // gates
    swaps = (False, True) if num_tokens > 64 else (False,)
    splits = {"qkv": (1, 2, 4, 7), "o": (2, 4, 7), "down": (4, 7, 8, 9, 14), "gate_up": (1,), "head": (1,)}[name]
    for block_c, row_bytes, split, swap in product((32, 64, 128, 256), (64, 128, 256), splits, swaps):
        tile, block_k = block_t * block_c * gates, row_bytes // element
        programs = num_out // block_c * split
        stage = (block_t + gates * block_c) * row_bytes
        resident = min(6, -(-programs // 132)) if name != "head" else (1 if block_c == 256 else 2)
        stages = min(8, (232_448 // resident - 1500) // stage)
        if tile > 128 * 256 or programs < 100 or stages < 3 or (row_bytes == 64) != (name == "gate_up" and stages > 4):
            continue
        yield LinearConfig(block_c, block_k, split, stages, 8 if tile > 128 * 128 else 4, swap)
    if name == "gate_up" and num_tokens >= 64:
        for warps in {4 if num_tokens == 64 else 8, 8}:
            yield LinearConfig(128, 128 // element, 1, 4, warps, tail=16)


def share_candidates(name: str, kind: str, num_tokens: int, num_out: int, num_in: int) -> Iterator[LinearConfig]:
    """Tiles for a rank's share of a linear: fewer and shorter rows, so smaller tiles and unsplit sums are in reach."""
    element, gates = (2 if kind == "bf16" else 1), (2 if name == "gate_up" else 1)
    block_t = max(16, triton.next_power_of_2(num_tokens))
    splits = {"gate_up": (1,), "head": (1,)}.get(name, (1, 2, 4))
    tails = (0, 16) if gates == 2 else (0,)
    for block_c, row_bytes, split, tail in product((32, 64, 128), (128, 256), splits, tails):
        rows = block_c + tail
        programs = triton.cdiv(num_out // gates, rows) * split
        resident = triton.cdiv(programs, 132)
        stages = min(8, (232_448 // min(resident, 3) - 1500) // ((block_t + gates * rows) * row_bytes))
        is_divisible = num_in % (row_bytes // element) == 0
        if (name != "head" and not 70 <= programs <= 300) or stages < 3 or not is_divisible:
            continue
        warps = 8 if block_t * rows * gates > 128 * 128 else 4
        yield LinearConfig(block_c, row_bytes // element, split, stages, warps, tail=tail)


def candidates_of(name: str, kind: str, num_tokens: int, tp: int) -> list[LinearConfig]:
    if tp == 1:
        return list(candidates(name, kind, num_tokens))
    return list(share_candidates(name, kind, num_tokens, *linear_shapes(tp)[name]))


def compile_one(case: tuple[str, str, int, LinearConfig, int]) -> None:
    """Put a kernel into Triton's cache."""
    name, kind, num_tokens, config, tp = case
    num_out, num_in = linear_shapes(tp)[name]
    weight, x = make_weight(num_out, num_in, kind), make_input(num_tokens, num_in, kind)
    values, x_scale = (x, None) if isinstance(x, Tensor) else x
    with suppress(OutOfResources):
        launch_linear(values, x_scale, weight.values, None, weight.scale, config, is_gated=name == "gate_up")


def compile_all(kinds: list[str], token_counts: list[int], tp: int, jobs: int) -> None:
    """Compiling takes longer than timing, and one process compiles one kernel at a time."""
    cases = [
        (name, kind, num_tokens, config, tp)
        for kind, name, num_tokens in product(kinds, linear_shapes(tp), token_counts)
        if name != "head" or kind == "bf16"
        for config in candidates_of(name, kind, num_tokens, tp)
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, cases, chunksize=4))


def tune(kinds: list[str], token_counts: list[int], tp: int) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for kind, name, weights in linears_of(kinds, tp):
        for num_tokens in token_counts:
            library = library_us(name, kind, num_tokens, weights, tp)
            timed = []
            for config in candidates_of(name, kind, num_tokens, tp):
                with suppress(OutOfResources):  # a tile that does not fit the device
                    timed.append((linear_pair(name, kind, num_tokens, weights, config, tp), config))
            timed.sort()
            results.append(
                {"kind": kind, "linear": name, "tokens": num_tokens, "library_us": library, "timed": timed[:6]}
            )
            best = " | ".join(f"{us:.1f} {tuple(config)}" for us, config in timed[:4])
            print(f"{kind:5} {name:8} T={num_tokens:<4} library {library:6.1f} | {best}", flush=True)
    return results
