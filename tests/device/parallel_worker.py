"""One rank of a test on several GPUs: decode with captured steps, then by calling the same work; write what came out.

torchrun ... tests/device/parallel_worker.py MODEL BP TP OUTPUT_FOLDER [stuck]
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, MeshConfig, RunConfig
from common.config.profile import GraphConfig
from common.decoding import Completion, GenerationRequest, Scheduler, decode_requests
from common.errors import EngineError
from lopa_cuda.assemble import assemble
from lopa_cuda.engine import CudaEngine

DECODE = DecodeConfig(num_lookahead=3, block_size=16, max_new_tokens=64, stop_at_eos=False)
# The first is long enough for the ranks to share its pass.
PROMPTS = [tuple((7 * n + 13 * m) % 1900 for m in range(length)) for n, length in enumerate((530, 80, 130))]
TIMEOUT_S = 8.0


def build(model: str, bp: int, tp: int) -> CudaEngine:
    profile = DeviceProfile(
        name="test", engine="lopa_cuda", device="cuda", graph=GraphConfig(mode="cuda_graph"), max_model_len=1024,
        mesh=MeshConfig(branch_parallel_size=bp, tensor_parallel_size=tp), collective_timeout_s=TIMEOUT_S,
    )  # fmt: skip
    return assemble(profile, RunConfig(model=model, load_format="dummy", max_num_requests=2, decode=DECODE))


def decode(engine: CudaEngine, model: str) -> dict[str, Any]:
    config = load_model_config(model)
    engine.cache.committed.zero_()
    scheduler = Scheduler(DECODE, mask_token_id=config.mask_token_id, eos_token_id=config.eos_token_id, num_slots=2)
    requests = iter(GenerationRequest(str(number), prompt) for number, prompt in enumerate(PROMPTS))
    ended = [result for result in decode_requests(requests, scheduler, engine) if isinstance(result, Completion)]
    committed = engine.cache.committed.view(torch.uint8).cpu().numpy().tobytes()
    return {
        "tokens": {result.id: result.canvas_token_ids for result in ended},
        "committed": hashlib.sha256(committed).hexdigest(),
    }


def main(model: str, bp: int, tp: int, output: Path, *, is_stuck: bool) -> None:
    rank = int(os.environ["RANK"])
    engine = build(model, bp, tp)
    result: dict[str, Any] = {"mesh": engine.describe()["mesh"]}
    if is_stuck:
        result["error"] = end_with_a_stuck_peer(engine, model, rank)
    else:
        result["sums_differ"] = differing_sums(engine)
        result["captured"] = decode(engine, model)
        for runner in (engine.layers, engine.head):
            for key, entry in runner._entries.items():
                entry.run = lambda runner=runner, key=key, entry=entry: runner._forward(key, entry.buffers)
        result["called"] = decode(engine, model)
    (output / f"rank{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    engine.close()
    if is_stuck:
        sys.exit(1)  # as a job does after an EngineError; the launcher then ends the stuck one


def differing_sums(engine: CudaEngine) -> int:
    """Elements of the norm's own all_reduce that are not NCCL's sum, over many sums of new numbers in turn."""
    from lopa_cuda import kernels
    from lopa_cuda.ops.fused import FusedOps

    ops, group = engine._ops, engine.mesh.tp_group
    if group is None:
        return 0
    assert isinstance(ops, FusedOps) and ops._exchange is not None, "the GPUs of one host share memory"
    draw = torch.Generator("cuda").manual_seed(engine.mesh.tp_rank)
    width, num_differing = engine.model.norm.weight.shape[0], 0
    most = ops._exchange.max_tokens
    for count, quantize in [*product([1, 64, most, 17], [None, "fp8"])] * 25:
        addend = torch.randn((count, width), generator=draw, device="cuda").bfloat16()
        shared = ops._exchange.next(addend)
        assert shared is not None
        _, summed = kernels.add_rms_norm(
            shared, torch.zeros_like(addend), engine.model.norm.weight, 1e-6, quantize=quantize
        )
        expected = addend.float()
        dist.all_reduce(expected, group=group)
        step = expected.abs().clamp(min=1e-3) * 2.0**-7  # of bf16; three or more ranks may be added in another order
        num_differing += int(((summed.float() - expected).abs() > step).sum())
    assert ops._exchange.next(torch.empty((most + 1, width))) is None
    return num_differing


def end_with_a_stuck_peer(engine: CudaEngine, model: str, rank: int) -> str | None:
    """The last rank stops answering; what the others raise."""
    if rank == engine.mesh.world_size - 1:
        time.sleep(3 * TIMEOUT_S)
        return None
    try:
        decode(engine, model)
    except EngineError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), is_stuck="stuck" in sys.argv[5:])
