"""The linears, each with the stage that takes its sum: the library beside the tiles' choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from lopa_cuda.bench.inputs import HEAD_SIZE, HEADS, KV_HEADS, SHAPES, WIDTH
from lopa_cuda.tiles import Kind, LinearShape, ModelLinear, find_config
from lopa_cuda.tuning.pair import LayerSizes, LinearPair

SIZES = LayerSizes(WIDTH, HEADS, KV_HEADS, HEAD_SIZE, HEAD_SIZE)


def linears_of(kinds: Sequence[Kind]) -> Iterator[ModelLinear]:
    """Linears of these kinds; the head is always bf16."""
    for kind, (name, shape) in product(kinds, SHAPES.items()):
        if name != "head" or kind == "bf16":
            yield ModelLinear(name, LinearShape(kind, *shape, "swiglu" if name == "gate_up" else "none"))


def compare_linears(kinds: Sequence[Kind], token_counts: list[int]) -> list[dict[str, object]]:
    """Library against the tiles' choice, each with the stage that follows."""
    results: list[dict[str, object]] = []
    for linear in linears_of(kinds):
        pair, (kind, num_out, num_in, fusion) = LinearPair(linear, SIZES), linear.shape
        num_bytes = num_out * num_in * (2 if kind == "bf16" else 1)
        for num_tokens in token_counts:
            library = pair.us(num_tokens, None)
            config = find_config(kind, num_out, num_in, num_tokens, fusion)
            ours = pair.us(num_tokens, config) if config else library
            case = {"kind": kind, "linear": linear.name, "tokens": num_tokens}
            results.append({**case, "library_us": library, "ours_us": ours})
            chosen = "kernel" if config else "library"
            print(
                f"{kind:5} {linear.name:8} T={num_tokens:<4} library {library:7.1f} {chosen} {ours:7.1f} us "
                f"{num_bytes / ours * 1e-6:.2f} TB/s"
            )
    return results
