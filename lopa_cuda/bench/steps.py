"""Whole steps beside the device's floors for the same bytes and products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.model import rotary_table
from lopa_cuda import kernels
from lopa_cuda.bench.inputs import (
    EPS,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    LAYER,
    LAYERS,
    QKV,
    SAMPLING,
    SHAPES,
    VOCAB,
    WIDTH,
    make_committed,
    make_rows,
)
from lopa_cuda.kernels.launch import Partials
from lopa_cuda.tiles import Kind
from lopa_cuda.tuning.stopwatch import Weight, as_quantize, graph_us, make_weight, random


class Step:
    """All layers, head and statistics of one step, as lopa_cuda.ops.plain strings the kernels together at tp = 1."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.quantize = kind, as_quantize(kind)
        self.layers = [{name: make_weight(*SHAPES[name], kind) for name in LAYER} for _ in range(LAYERS)]
        self.bias, self.norm_weight, self.head = random(QKV), random(WIDTH), make_weight(VOCAB, WIDTH, "bf16")
        self.table = rotary_table(8192, HEAD_SIZE, 1e6, torch.device("cuda"))

    @property
    def weights(self) -> list[Tensor]:
        return [weight.values for layer in self.layers for weight in layer.values()] + [self.head.values]

    def bind(self, num_rows: int, width: int, prefix: int) -> Callable[[int], Tensor]:
        num_tokens = num_rows * width
        x = random(num_tokens, WIDTH)
        position = (torch.arange(num_tokens, device="cuda") % width + prefix).int()
        committed = make_committed(prefix, len(self.layers))
        window = random(len(self.layers), 2, num_tokens, KV_HEADS, HEAD_SIZE)
        rows = make_rows(num_rows, width, prefix)

        def linear(h: object, weight: Weight, bias: Tensor | None = None) -> Tensor | Partials:
            return kernels.linear_partials(h, weight.values, bias, weight.scale)  # type: ignore[arg-type]

        def forward(_: int) -> Tensor:
            hidden, residual = x, None
            for index, layer in enumerate(self.layers):
                h, residual = kernels.add_rms_norm(hidden, residual, self.norm_weight, EPS, quantize=self.quantize)
                qkv = linear(h, layer["qkv"], self.bias)
                q = kernels.rope_prewrite(qkv, position, self.table, window[index], num_heads=HEADS)
                attended = kernels.window_attention(q, committed[index], window[index], **rows, quantize=self.quantize)
                hidden = linear(attended, layer["o"])
                h, residual = kernels.add_rms_norm(hidden, residual, self.norm_weight, EPS, quantize=self.quantize)
                h = kernels.gate_up_swiglu(h, layer["gate_up"].values, layer["gate_up"].scale, quantize=self.quantize)
                hidden = linear(h, layer["down"])
            h, _ = kernels.add_rms_norm(hidden, residual, self.norm_weight, EPS)
            statistics_N6 = kernels.head_statistics(kernels.linear(h, self.head.values), 0, SAMPLING)
            return kernels.merge_statistics(statistics_N6[None], "neg_entropy")

        return forward


def steps(
    kinds: Sequence[Kind], cases: list[tuple[int, int]], prefix: int, floors: dict[str, float]
) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for kind in kinds:
        step = Step(kind)
        num_bytes = sum(weight.numel() * weight.element_size() for weight in step.weights)
        num_weights = sum(weight.numel() for weight in step.weights)
        for num_rows, width in cases:
            ms = graph_us(step.bind(num_rows, width, prefix), 1, replays=50) * 1e-3
            weight_ms = num_bytes / floors["bytes_per_s"] * 1e3
            num_flops = 2 * num_weights * num_rows * width
            matrix_ms, sustained_ms = (num_flops / floors[k] * 1e3 for k in ("flops_per_s", "sustained_flops_per_s"))
            shape = {"kind": kind, "rows": num_rows, "width": width}
            results.append({**shape, "ms": ms, "weight_ms": weight_ms, "matrix_ms": matrix_ms})
            print(
                f"{kind:5} R={num_rows:<3} W={width:<4} {ms:7.3f} ms, weights {weight_ms:.2f} ms "
                f"x {ms / weight_ms:.3f}, bf16 matrix {matrix_ms:.2f} ms x {ms / matrix_ms:.2f}, sustained "
                f"{sustained_ms:.2f} ms x {ms / sustained_ms:.2f}",
                flush=True,
            )
        del step
        torch.cuda.empty_cache()
    return results
