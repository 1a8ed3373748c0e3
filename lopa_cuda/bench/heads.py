"""What follows the head's product: greedy statistics, and samples with either kind of probability."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import torch

from common.model import SamplingRows, sampling_fields
from lopa_cuda import kernels
from lopa_cuda.bench.inputs import SAMPLING, VOCAB
from lopa_cuda.ops.fused import sampled_of
from lopa_cuda.tuning.stopwatch import graph_us, random

TEMPERATURE, TOP_P = 0.7, 0.9


def head_runs(num_tokens: int) -> dict[str, Callable[[int], object]]:
    """Runs over one vocabulary shard. `tempered`: `temperature_acts_on: draw_and_confidence`."""
    logits, place = random(num_tokens, VOCAB, scale=3.0), np.arange(num_tokens)
    runs: dict[str, Callable[[int], object]] = {"greedy": lambda _: kernels.head_statistics(logits, 0, SAMPLING)}
    for is_cut, tempers in product((False, True), (False, True)):
        settings = np.array((TEMPERATURE, TOP_P if is_cut else 1, 0), dtype=np.float32)[:, None].repeat(num_tokens, 1)
        rows = SamplingRows.of(torch.from_numpy(sampling_fields(settings, place, place, place, num_tokens)).cuda())
        sampling = SAMPLING._replace(is_sampled=True, is_cut=is_cut, tempers_confidence=tempers)
        name = "sampled" + ", top_p" * is_cut + ", tempered" * tempers
        runs[name] = lambda _, sampling=sampling, rows=rows: sampled_of(
            logits, 0, sampling, rows, lambda value: value[None]
        )
    return runs


def heads(token_counts: list[int]) -> list[dict[str, object]]:
    """Time each alone, in a captured graph."""
    results: list[dict[str, object]] = []
    for num_tokens in token_counts:
        timed = {name: graph_us(run, 16) for name, run in head_runs(num_tokens).items()}
        results.append({"tokens": num_tokens, **timed})
        print(f"T={num_tokens}: " + ", ".join(f"{name} {us:.1f}" for name, us in timed.items()), flush=True)
    return results
