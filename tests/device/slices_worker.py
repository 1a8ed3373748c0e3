"""One rank of a test on several GPUs: passes of prompts cut over the branch ranks, and the same passes not cut. Writes
how far they are apart, and what each takes.

torchrun ... tests/device/slices_worker.py MODEL BP TP OUTPUT_FOLDER
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.config import DecodeConfig, DeviceProfile, MeshConfig, RunConfig
from common.config.profile import GraphConfig
from common.decoding import CommitSpan, RowField, Sampling, StepPlan
from graphs.runner import graph_uses
from lopa_cuda.assemble import assemble
from lopa_cuda.engine import CudaEngine
from lopa_cuda.floors import median_seconds
from lopa_cuda.steps import slices

DECODE = DecodeConfig(num_lookahead=3, block_size=16, max_new_tokens=64, stop_at_eos=False)
BLOCK = 32  # of block-causal attention
# Lengths of the prompts of a pass, how many positions of each are cached already, and whether their blocks see what
# lies after them.
CASES: dict[str, tuple[list[int], int, bool]] = {
    "a prompt": ([1040], 0, True),
    "a prompt, block-causal": ([1040], 0, False),
    "a piece of a prompt": ([512], 320, False),
    "several prompts": ([700, 37, 300], 0, True),
    "the longest": ([1920], 0, True),
}


def build(model: str, bp: int, tp: int) -> CudaEngine:
    profile = DeviceProfile(
        name="test", engine="lopa_cuda", device="cuda", graph=GraphConfig(mode="cuda_graph"), max_model_len=2048,
        mesh=MeshConfig(branch_parallel_size=bp, tensor_parallel_size=tp), collective_timeout_s=60,
    )  # fmt: skip
    return assemble(profile, RunConfig(model=model, load_format="dummy", max_num_requests=3, decode=DECODE))


def plan_of(lengths: list[int], cached: int, mask_token_id: int, *, is_full: bool) -> StepPlan:
    """One row a request, all of which becomes final."""
    count = len(lengths)
    row_fields_8R = np.zeros((len(RowField), count), dtype=np.int64)
    row_fields_8R[RowField.FIRST] = np.cumsum(lengths) - lengths
    row_fields_8R[[RowField.NUM_ENTRIES, RowField.NUM_KEYS]] = lengths
    row_fields_8R[[RowField.START, RowField.CACHED]] = cached
    row_fields_8R[RowField.SLOT] = np.arange(count)
    row_fields_8R[RowField.STEP] = cached > 0
    position_T = cached + np.concatenate([np.arange(length) for length in lengths])
    end_T = cached + np.repeat(lengths, lengths)
    horizon_T = end_T if is_full else np.minimum(end_T, (position_T // BLOCK + 1) * BLOCK)
    token_T = np.random.default_rng(position_T.size).integers(0, 250, position_T.size)
    return StepPlan(
        np.stack((token_T, position_T, horizon_T)), np.arange(position_T.size) % 5 == 0, row_fields_8R,
        np.arange(count), tuple(CommitSpan(slot, slot, cached, length) for slot, length in enumerate(lengths)),
        Sampling("neg_entropy", mask_token_id), commits_locally=not is_full,  # as the heads are captured for
    )  # fmt: skip


def run(engine: CudaEngine, lengths: list[int], cached: int, *, is_full: bool) -> dict[str, Any]:
    """One pass and its commit, after another pass that fills the cache."""
    mask_token_id = engine._config.mask_of(None)
    if cached:
        forward_and_commit(engine, plan_of([cached] * len(lengths), 0, mask_token_id, is_full=is_full))
    plan = plan_of(lengths, cached, mask_token_id, is_full=is_full)
    runners = engine.layers, engine.head
    _, misses = graph_uses(*runners)
    values_3T = forward_and_commit(engine, plan)
    positions = np.concatenate([engine.cache.positions(span) for span in plan.commits])
    index = torch.from_numpy(positions).to(engine.cache.committed.device)
    return {
        "num_tokens": engine.last_num_tokens(),
        "misses": graph_uses(*runners)[1] - misses,
        "kv": engine.cache.committed.flatten(2, 3).index_select(2, index).cpu(),
        "values": torch.from_numpy(values_3T[:, plan.is_read_T]),
        "ms": 1e3 * median_seconds(lambda: engine.forward(plan), engine.device),
    }


def forward_and_commit(engine: CudaEngine, plan: StepPlan) -> np.ndarray:
    values_3T = engine.forward(plan).values_3T.copy()
    engine.commit(plan, np.arange(plan.num_rows))
    return values_3T


def compared(engine: CudaEngine) -> dict[str, Any]:
    """Return by case how a cut pass differs from one that is not, and from the same that is called instead of
    replayed."""
    least_saved, all_cut = slices.LEAST_SAVED, run_all(engine)
    slices.LEAST_SAVED = 10**9
    all_whole = run_all(engine)
    slices.LEAST_SAVED = least_saved
    for key, entry in engine.layers._entries.items():
        entry.run = lambda key=key, entry=entry: engine.layers._forward(key, entry.buffers)
    called = run_all(engine)
    found = {}
    for name, whole in all_whole.items():
        own = all_cut[name]
        found[name] = {
            "num_entries": sum(CASES[name][0]),
            "num_tokens": [own["num_tokens"], whole["num_tokens"]],
            "misses": own["misses"],
            "kv": hashlib.sha256(own["kv"].view(torch.uint8).numpy().tobytes()).hexdigest(),
            "kv_error": relative_error(own["kv"], whole["kv"]),
            "tokens_alike": (own["values"][0] == whole["values"][0]).float().mean().item(),
            "confidence_error": (own["values"][2] - whole["values"][2]).abs().max().item(),
            "is_replay_exact": torch.equal(own["kv"], called[name]["kv"])
            and torch.equal(own["values"], called[name]["values"]),
            "ms": [own["ms"], whole["ms"]],
        }
    return found


def run_all(engine: CudaEngine) -> dict[str, dict[str, Any]]:
    return {name: run(engine, lengths, cached, is_full=full) for name, (lengths, cached, full) in CASES.items()}


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


def main(model: str, bp: int, tp: int, output: Path) -> None:
    engine = build(model, bp, tp)
    result = {"tp_rank": engine.mesh.tp_rank, "cases": compared(engine)}
    (output / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result), encoding="utf-8")
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
