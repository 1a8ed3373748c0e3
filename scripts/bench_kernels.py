"""Time the CUDA kernels on one GPU at Dream-7B's shapes: linears against the library, stages, whole steps.

    python scripts/bench_kernels.py [--sections linears stages steps] [--tune] [--tensor-parallel N] [--json FILE]

Everything is timed inside captured graphs, median over replays, rotating over enough weight copies that nothing stays
in L2. `--tune` searches the skinny linears' configurations and prints entries for lopa_cuda/kernels/linear_table.py;
with `--tensor-parallel` for one rank's share of them, where o and down are summed before they travel.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from common.model import rotary_table
from common.runtime import measure_floors
from lopa_cuda import kernels
from lopa_cuda.floors import median_seconds
from lopa_cuda.kernels import linear_table
from lopa_cuda.kernels.launch import Partials, Quantize
from lopa_cuda.kernels.linear import launch_linear
from lopa_cuda.kernels.linear_table import LinearConfig
from quant.w8a8 import QuantizedActivation

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCAB = 3584, 18944, 28, 28, 4, 128, 152064
MASK_ID, EPS = 151666, 1e-6
QKV = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
ROTATION_BYTES = 400 * 2**20
KINDS = ("bf16", "int8", "fp8")


def linear_shapes(tp: int) -> dict[str, tuple[int, int]]:
    """(output channels, input channels) of every linear on one of tp ranks."""
    return {
        "qkv": (QKV // tp, WIDTH), "o": (WIDTH, WIDTH // tp), "gate_up": (2 * INNER // tp, WIDTH),
        "down": (WIDTH, INNER // tp), "head": (VOCAB // tp, WIDTH),
    }  # fmt: skip


SHAPES = linear_shapes(1)
LAYER = ("qkv", "o", "gate_up", "down")


def graph_us(run: Callable[[int], object], launches: int, replays: int = 15) -> float:
    """Microseconds of one run(i), captured `launches` times in one graph; median over replays."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i)
    times = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times[3:])


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


@dataclass
class Weight:
    values: Tensor
    scale: Tensor | None = None


def make_weight(num_out: int, num_in: int, kind: str) -> Weight:
    """Random, of the scale trained weights have."""
    if kind == "bf16":
        return Weight(random(num_out, num_in, scale=0.02))
    values = torch.randint(-127, 128, (num_out, num_in), device="cuda", dtype=torch.int8)
    if kind == "fp8":
        values = random(num_out, num_in, scale=100.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Weight(values, torch.full((num_out,), 2e-4, device="cuda"))


def make_input(num_tokens: int, num_in: int, kind: str) -> Tensor | QuantizedActivation:
    x = random(num_tokens, num_in)
    return x if kind == "bf16" else kernels.quantize_per_token(x, kind)  # type: ignore[arg-type]


def as_quantize(kind: str) -> Quantize | None:
    return None if kind == "bf16" else kind  # type: ignore[return-value]


# --- linears --------------------------------------------------------------------------------------------------------


def linear_pair(
    name: str, kind: str, num_tokens: int, weights: list[Weight], config: LinearConfig | None, tp: int = 1
) -> float:
    """Microseconds of a linear with the stage that takes its split-K sum: what its choice costs a step."""
    x = make_input(num_tokens, weights[0].values.shape[1], kind)
    values, x_scale = (x, None) if isinstance(x, Tensor) else x
    residual, norm_weight = random(num_tokens, WIDTH), random(WIDTH)
    position = torch.arange(num_tokens, device="cuda", dtype=torch.int32)
    table = rotary_table(4096, HEAD_SIZE, 1e6, torch.device("cuda"))
    window = random(2, 1, num_tokens, KV_HEADS // tp, HEAD_SIZE)
    is_gated = name == "gate_up"

    def consume(y: Tensor | Partials) -> None:
        if name == "qkv":
            kernels.rope_prewrite(y, position, table, window, num_heads=HEADS // tp, width=num_tokens)
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
    kept, linear_table.TABLE = linear_table.TABLE, {}
    try:
        return linear_pair(name, kind, num_tokens, weights, None, tp)
    finally:
        linear_table.TABLE = kept


def rotation(shape: tuple[int, int], kind: str) -> list[Weight]:
    num_bytes = shape[0] * shape[1] * (2 if kind == "bf16" else 1)
    return [make_weight(*shape, kind) for _ in range(max(2, -(-ROTATION_BYTES // num_bytes)))]


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


def linears_of(kinds: list[str], tp: int = 1) -> Iterator[tuple[str, str, list[Weight]]]:
    """Kind, name and rotating weights of every linear; the head is always bf16."""
    for kind, (name, shape) in product(kinds, linear_shapes(tp).items()):
        if name != "head" or kind == "bf16":
            yield kind, name, rotation(shape, kind)


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


def compare_linears(kinds: list[str], token_counts: list[int]) -> list[dict[str, object]]:
    """Library against the table's choice, each with the stage behind it."""
    results: list[dict[str, object]] = []
    for kind, name, weights in linears_of(kinds):
        values = weights[0].values
        for num_tokens in token_counts:
            library = library_us(name, kind, num_tokens, weights)
            fusion = "swiglu" if name == "gate_up" else "none"
            config = linear_table.find_config(kind, *values.shape, num_tokens, fusion)
            ours = linear_pair(name, kind, num_tokens, weights, config) if config else library
            results.append({"kind": kind, "linear": name, "tokens": num_tokens, "library_us": library, "ours_us": ours})
            rate = values.numel() * values.element_size() / ours * 1e-6
            chosen = "kernel" if config else "library"
            print(f"{kind:5} {name:8} T={num_tokens:<4} library {library:7.1f} {chosen} {ours:7.1f} us {rate:.2f} TB/s")
    return results


# --- stages ---------------------------------------------------------------------------------------------------------


def make_rows(num_rows: int, width: int, prefix: int) -> dict[str, Tensor]:
    def full(value: int, *shape: int) -> Tensor:
        return torch.full(shape, value, device="cuda", dtype=torch.int32)

    return {
        "slot_R": full(0, num_rows), "start_R": full(prefix, num_rows), "num_keys_R": full(width, num_rows),
        "cached_R": full(prefix, num_rows), "horizon_RW": full(prefix + width, num_rows, width),
    }  # fmt: skip


def stage_runs(num_rows: int, width: int, prefix: int) -> dict[str, Callable[[int], object]]:
    num_tokens = num_rows * width
    table = rotary_table(prefix + 4096, HEAD_SIZE, 1e6, torch.device("cuda"))
    x, residual, norm_weight = random(num_tokens, WIDTH), random(num_tokens, WIDTH), random(WIDTH)
    parts = Partials(torch.randn(4, num_tokens, WIDTH, device="cuda"), None, None, None)
    qkv, gate_up, inner = random(num_tokens, QKV), random(num_tokens, 2 * INNER), random(num_tokens, INNER)
    position = (torch.arange(num_tokens, device="cuda") % width + prefix).int()
    committed = random(2, 1, prefix + 1024, KV_HEADS, HEAD_SIZE)
    window, q = random(2, num_rows, width, KV_HEADS, HEAD_SIZE), random(num_tokens, HEADS, HEAD_SIZE)
    rows, logits = make_rows(num_rows, width, prefix), random(num_tokens, VOCAB)
    rope = {"num_heads": HEADS, "width": width}
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
        "rope": lambda _: kernels.rope_prewrite(qkv, position, table, window, **rope),
        "swiglu": lambda _: kernels.swiglu(gate_up),
        "swiglu to int8": lambda _: kernels.swiglu(gate_up, quantize="int8"),
        "quantize": lambda _: kernels.quantize_per_token(inner, "int8"),
        "statistics": lambda _: kernels.head_statistics(logits, 0, MASK_ID),
        **attention,
    }


def stages(cases: list[tuple[int, int]], prefix: int) -> list[dict[str, object]]:
    """Each stage alone, launched back to back: its whole latency as a chain of dependent launches sees it."""
    results: list[dict[str, object]] = []
    for num_rows, width in cases:
        timed = {name: graph_us(run, 16) for name, run in stage_runs(num_rows, width, prefix).items()}
        results.append({"rows": num_rows, "width": width, **timed})
        print(f"R={num_rows} W={width}: " + ", ".join(f"{name} {us:.1f}" for name, us in timed.items()), flush=True)
    return results


# --- steps ----------------------------------------------------------------------------------------------------------


class Step:
    """All layers, head and statistics of one step, as lopa_cuda.ops.plain strings the kernels together at tp = 1."""

    def __init__(self, kind: str, num_layers: int = LAYERS) -> None:
        self.kind, self.quantize = kind, as_quantize(kind)
        self.layers = [{name: make_weight(*SHAPES[name], kind) for name in LAYER} for _ in range(num_layers)]
        self.bias, self.norm_weight, self.head = random(QKV), random(WIDTH), make_weight(VOCAB, WIDTH, "bf16")
        self.table = rotary_table(8192, HEAD_SIZE, 1e6, torch.device("cuda"))

    @property
    def weights(self) -> list[Tensor]:
        return [weight.values for layer in self.layers for weight in layer.values()] + [self.head.values]

    def bind(self, num_rows: int, width: int, prefix: int) -> Callable[[int], Tensor]:
        num_tokens = num_rows * width
        x = random(num_tokens, WIDTH)
        position = (torch.arange(num_tokens, device="cuda") % width + prefix).int()
        committed = random(len(self.layers), 2, 1, prefix + 1024, KV_HEADS, HEAD_SIZE)
        window = random(len(self.layers), 2, num_rows, width, KV_HEADS, HEAD_SIZE)
        rows = make_rows(num_rows, width, prefix)

        def linear(h: object, weight: Weight, bias: Tensor | None = None) -> Tensor | Partials:
            return kernels.linear_partials(h, weight.values, bias, weight.scale)  # type: ignore[arg-type]

        def forward(_: int) -> Tensor:
            hidden, residual = x, None
            for index, layer in enumerate(self.layers):
                h, residual = kernels.add_rms_norm(hidden, residual, self.norm_weight, EPS, quantize=self.quantize)
                qkv = linear(h, layer["qkv"], self.bias)
                q = kernels.rope_prewrite(qkv, position, self.table, window[index], num_heads=HEADS, width=width)
                attended = kernels.window_attention(q, committed[index], window[index], **rows, quantize=self.quantize)
                hidden = linear(attended, layer["o"])
                h, residual = kernels.add_rms_norm(hidden, residual, self.norm_weight, EPS, quantize=self.quantize)
                h = kernels.gate_up_swiglu(h, layer["gate_up"].values, layer["gate_up"].scale, quantize=self.quantize)
                hidden = linear(h, layer["down"])
            h, _ = kernels.add_rms_norm(hidden, residual, self.norm_weight, EPS)
            statistics_N6 = kernels.head_statistics(kernels.linear(h, self.head.values), 0, MASK_ID)
            return kernels.merge_statistics(statistics_N6[None], "neg_entropy")

        return forward


def steps(
    kinds: list[str], cases: list[tuple[int, int]], prefix: int, floors: dict[str, float]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", default=["linears", "stages", "steps"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 32, 64, 96, 128, 256])
    parser.add_argument("--tune", action="store_true", help="search the linears' configurations instead")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="with --tune: the share of one of N ranks")
    parser.add_argument("--jobs", type=int, default=8, help="with --tune: processes that compile")
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = [(1, 32), (1, 64), (1, 128), (4, 32), (8, 64), (8, 128)]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    floors = measure_floors(torch.device("cuda"), torch.bfloat16, median_seconds)
    result: dict[str, object] = {"floors": floors}
    print(floors, flush=True)
    if arguments.tune:
        tp = arguments.tensor_parallel
        compile_all(arguments.kinds, arguments.tokens, tp, arguments.jobs)
        result["tune"] = tune(arguments.kinds, arguments.tokens, tp)
    else:
        if "linears" in arguments.sections:
            result["linears"] = compare_linears(arguments.kinds, arguments.tokens)
        if "stages" in arguments.sections:
            result["stages"] = stages(cases, arguments.prefix)
        if "steps" in arguments.sections:
            result["steps"] = steps(arguments.kinds, cases, arguments.prefix, floors)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1, default=str))


if __name__ == "__main__":
    main()
