"""Ranks of the Ascend engine's distributed tests: decode every setting on a mesh, write what came out as JSON.

    [torchrun ...] tests/distributed/ascend_worker.py MODEL OUTPUT_FOLDER PROFILE SETTING...

PROFILE is JSON: a device profile's own keys. Without torchrun it forks its ranks from one process that has imported
everything, so that sixteen start in the time of one. On device npu they are simulated devices (tests/npu/sim, which is
on PYTHONPATH).
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, MeshConfig, RunConfig
from common.decoding import Completion, GenerationRequest, Int, Scheduler, StepPlan, decode_requests
from lopa_ascend.assemble import assemble
from lopa_ascend.engine import AscendEngine
from tests.distributed.ranks import fork_ranks

PROMPTS = [[(13 * n * n + 7 * m + n) % 290 + 2 for m in range(length)] for n, length in enumerate((121, 9, 40))]
SETTINGS = {
    "k=7": {"num_lookahead": 7},
    "k=3 fresh": {"num_lookahead": 3, "shift_row": "fresh"},
    "k=7 T=0.3": {"num_lookahead": 7, "temperature": 0.3},
    "k=1 T=1": {"num_lookahead": 1, "temperature": 1.0, "top_p": 0.9},  # fewer rows than branch ranks
}


def decode_of(name: str) -> DecodeConfig:
    return DecodeConfig.model_validate(
        {"block_size": 8, "max_new_tokens": 16, "window_attention": "block_causal", **SETTINGS[name]}
    )


def decode_all(engine: AscendEngine, model: Path, decode: DecodeConfig) -> dict[str, Any]:
    """Tokens by request, of this replica's requests."""
    mesh, config = engine.mesh, load_model_config(model)
    scheduler = Scheduler(
        decode, mask_token_id=config.mask_token_id, eos_token_id=config.eos_token_id, num_slots=2, seed=1
    )
    mine = [(n, prompt) for n, prompt in enumerate(PROMPTS) if n % mesh.dp_size == mesh.dp_rank]
    requests = iter([GenerationRequest(str(n), tuple(prompt)) for n, prompt in mine])
    results = decode_requests(requests, scheduler, engine)
    done = [result for result in results if isinstance(result, Completion)]
    return {result.id: [result.num_forwards, *result.canvas_token_ids] for result in done}


def compare_commits(engine: AscendEngine, tolerance: float) -> None:
    """Check before each commit that every branch rank's own copy of the span is that of the others."""
    commit = engine.commit

    def checked(plan: StepPlan, winners: Int) -> None:
        for span in plan.commits if engine.mesh.bp_group is not None else ():
            held = engine.kv.pages_of(span.slot)
            pages = list(held.shared + held.tails[0])
            kv = engine.cache.read(pages)[:, :, : span.start + span.length].contiguous()
            copies = [torch.empty_like(kv) for _ in range(engine.mesh.bp_size)]
            dist.all_gather(copies, kv, group=engine.mesh.bp_group)
            for other in copies:
                torch.testing.assert_close(other.cpu(), kv.cpu(), rtol=tolerance, atol=tolerance)
        commit(plan, winners)

    engine.commit = checked  # type: ignore[method-assign]


def run_rank(model: Path, output: Path, profile: DeviceProfile, settings: list[str]) -> None:
    with simulated(profile.device) as device:
        engine = assemble(profile, RunConfig(model=str(model), max_num_requests=2, decode=decode_of("k=7")))
        compare_commits(engine, 1e-4 if profile.dtype == "float32" else 0.05)
        results = {name: decode_all(engine, model, decode_of(name)) for name in settings}
        rank = engine.mesh.rank
        report = {"dp": engine.mesh.dp_rank, "tokens": results, "calls": under_all_reduces(device)}
        (output / f"rank{rank:02}.json").write_text(json.dumps(report))
        if dist.is_initialized():
            dist.barrier()


def simulated(device: str) -> Any:
    if device == "cpu":
        return nullcontext()
    from sim.device import SimulatedNpu

    return SimulatedNpu(record=True)


def under_all_reduces(device: Any) -> list[list[str]]:
    """The operator and arguments of every prefetch and every all-reduce, in the order in which they were issued."""
    kinds = "npu_prefetch", "allreduce", "all_reduce"
    stream = [] if device is None else device.stream
    return [[call.op, *call.arguments] for call in stream if any(kind in call.op for kind in kinds)]


def main() -> None:
    model, output, profile_json, *settings = sys.argv[1:]
    profile = DeviceProfile.model_validate(
        {"name": "distributed", "engine": "lopa_ascend", "max_model_len": 160, **json.loads(profile_json)}
    )
    arguments = Path(model), Path(output), profile, settings
    if profile.device == "npu":
        from sim import runtime

        runtime.load()
        if profile.graph.mode == "torchair":
            from sim import export

            export.load_torchair()
    if "RANK" in os.environ:
        run_rank(*arguments)
        return
    assert isinstance(profile.mesh, MeshConfig)
    fork_ranks(run_rank, profile.mesh.num_processes, arguments)


if __name__ == "__main__":
    main()
