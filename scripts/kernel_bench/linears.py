"""The linears, each with the stage that takes its sum: the library beside the tiles' choice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from common.model import rotary_table
from lopa_cuda import kernels
from lopa_cuda.kernels.launch import Partials
from lopa_cuda.kernels.linear import launch_linear
from lopa_cuda.tiles import LinearConfig, find_config, only_tiles

from .inputs import (
    EPS,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    WIDTH,
    Weight,
    graph_us,
    linear_shapes,
    make_input,
    make_weight,
    random,
)

ROTATION_BYTES = 400 * 2**20


def linear_pair(
    name: str, kind: str, num_tokens: int, weights: list[Weight], config: LinearConfig | None, tp: int = 1
) -> float:
    """Microseconds of a linear with the stage that takes its split-K sum: what its choice costs a step."""
    x = make_input(num_tokens, weights[0].values.shape[1], kind)
    values, x_scale = (x, None) if isinstance(x, Tensor) else x
    residual, norm_weight = random(num_tokens, WIDTH), random(WIDTH)
    position = torch.arange(num_tokens, device="cuda", dtype=torch.int32)
    table = rotary_table(4096, HEAD_SIZE, 1e6, torch.device("cuda"))
    window = random(2, num_tokens, KV_HEADS // tp, HEAD_SIZE)
    is_gated = name == "gate_up"

    def consume(y: Tensor | Partials) -> None:
        if name == "qkv":
            kernels.rope_prewrite(y, position, table, window, num_heads=HEADS // tp)
        elif tp > 1 and name in ("o", "down"):
            kernels.add_rms_norm(kernels.sum_partials(y), residual, norm_weight, EPS)
        elif is_gated and kind == "bf16":  # whatever comes next, so that the launches alternate as in a layer
            kernels.add_rms_norm(residual, residual, norm_weight, EPS)
        elif is_gated:
            kernels.quantize_per_token(y, kind)  # type: ignore[arg-type]
        elif name != "head":
            kernels.add_rms_norm(y, residual, norm_weight, EPS)

    def run(i: int) -> None:
        weight = weights[i % len(weights)]
        if config is not None:
            consume(launch_linear(values, x_scale, weight.values, None, weight.scale, config, is_gated=is_gated))
            return
        y = kernels.linear_partials(x, weight.values, None, weight.scale)
        consume(kernels.swiglu(kernels.sum_partials(y)) if is_gated else y)

    return graph_us(run, max(8, len(weights)))


def library_us(name: str, kind: str, num_tokens: int, weights: list[Weight], tp: int = 1) -> float:
    with only_tiles({}):
        return linear_pair(name, kind, num_tokens, weights, None, tp)


def rotation(shape: tuple[int, int], kind: str) -> list[Weight]:
    num_bytes = shape[0] * shape[1] * (2 if kind == "bf16" else 1)
    return [make_weight(*shape, kind) for _ in range(max(2, -(-ROTATION_BYTES // num_bytes)))]


def linears_of(kinds: list[str], tp: int = 1) -> Iterator[tuple[str, str, list[Weight]]]:
    """Kind, name and rotating weights of every linear; the head is always bf16."""
    for kind, (name, shape) in product(kinds, linear_shapes(tp).items()):
        if name != "head" or kind == "bf16":
            yield kind, name, rotation(shape, kind)


def compare_linears(kinds: list[str], token_counts: list[int]) -> list[dict[str, object]]:
    """Library against the tiles' choice, each with the stage behind it."""
    results: list[dict[str, object]] = []
    for kind, name, weights in linears_of(kinds):
        values = weights[0].values
        for num_tokens in token_counts:
            library = library_us(name, kind, num_tokens, weights)
            fusion = "swiglu" if name == "gate_up" else "none"
            config = find_config(kind, *values.shape, num_tokens, fusion)
            ours = linear_pair(name, kind, num_tokens, weights, config) if config else library
            results.append({"kind": kind, "linear": name, "tokens": num_tokens, "library_us": library, "ours_us": ours})
            rate = values.numel() * values.element_size() / ours * 1e-6
            chosen = "kernel" if config else "library"
            print(f"{kind:5} {name:8} T={num_tokens:<4} library {library:7.1f} {chosen} {ours:7.1f} us {rate:.2f} TB/s")
    return results
