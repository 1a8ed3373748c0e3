"""Times every stage of a layer alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.model import rotary_table
from lopa_cuda import kernels
from lopa_cuda.bench.inputs import (
    EPS,
    HEAD_SIZE,
    HEADS,
    INNER,
    KV_HEADS,
    QKV,
    SAMPLING,
    VOCAB,
    WIDTH,
    make_committed,
    make_rows,
)
from lopa_cuda.kernels.launch import Partials
from lopa_cuda.tuning.stopwatch import graph_us, random


def stage_runs(num_rows: int, width: int, prefix: int) -> dict[str, Callable[[int], object]]:
    num_tokens = num_rows * width
    table = rotary_table(prefix + 4096, HEAD_SIZE, 1e6, torch.device("cuda"))
    x, residual, norm_weight = random(num_tokens, WIDTH), random(num_tokens, WIDTH), random(WIDTH)
    parts = Partials(torch.randn(4, num_tokens, WIDTH, device="cuda"), None, None, None)
    qkv, gate_up, inner = random(num_tokens, QKV), random(num_tokens, 2 * INNER), random(num_tokens, INNER)
    position = (torch.arange(num_tokens, device="cuda") % width + prefix).int()
    committed = make_committed(prefix)
    window, q = random(2, num_tokens, KV_HEADS, HEAD_SIZE), random(num_tokens, HEADS, HEAD_SIZE)
    rows, logits = make_rows(num_rows, width, prefix), random(num_tokens, VOCAB)
    attention = {
        f"attention, {splits or 'chosen'} splits": lambda _, splits=splits: kernels.window_attention(
            q, committed, window, **rows, num_splits=splits
        )
        for splits in (None, 1, 2, 4, 6, 8)
    }
    return {
        "norm": lambda _: kernels.add_rms_norm(x, residual, norm_weight, EPS),
        "norm of 4 parts": lambda _: kernels.add_rms_norm(parts, residual, norm_weight, EPS),
        "norm to int8": lambda _: kernels.add_rms_norm(x, residual, norm_weight, EPS, quantize="int8"),
        "rope": lambda _: kernels.rope_prewrite(qkv, position, table, window, num_heads=HEADS),
        "swiglu": lambda _: kernels.swiglu(gate_up),
        "swiglu to int8": lambda _: kernels.swiglu(gate_up, quantize="int8"),
        "quantize": lambda _: kernels.quantize_per_token(inner, "int8"),
        "statistics": lambda _: kernels.head_statistics(logits, 0, SAMPLING),
        **attention,
    }


def stages(cases: list[tuple[int, int]], prefix: int) -> list[dict[str, object]]:
    """Time each stage alone, launched back to back: its whole latency as a chain of dependent launches sees it."""
    results: list[dict[str, object]] = []
    for num_rows, width in cases:
        timed = {name: graph_us(run, 16) for name, run in stage_runs(num_rows, width, prefix).items()}
        results.append({"rows": num_rows, "width": width, **timed})
        print(f"R={num_rows} W={width}: " + ", ".join(f"{name} {us:.1f}" for name, us in timed.items()), flush=True)
    return results
