"""The ranks of a distributed test: decode, replace the weights, decode again, on a mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from common.config import DecodeConfig, MeshConfig, RunConfig
from common.decoding import (
    Completion,
    GenerationRequest,
    PutWeights,
    ReadWeights,
    ReleaseMemory,
    ResumeMemory,
    Scheduler,
    carry_out,
    decode_requests,
)
from common.platforms import build_engine
from tests.distributed.ranks import cpu_profile

MASK, EOS = 310, 300
PROMPTS = [[(13 * n * n + 7 * m + n) % 290 + 2 for m in range(9 + 6 * n)] for n in range(3)]
DECODE = DecodeConfig(
    num_lookahead=3, block_size=16, max_new_tokens=48, window_attention="block_causal", shift_row="fresh"
)


def engine_of(name: str, model: str, mesh: MeshConfig) -> Any:
    return build_engine(cpu_profile(name, mesh), RunConfig(model=model, max_num_requests=2, decode=DECODE))


def tokens_of(engine: Any) -> list[list[int]]:
    scheduler = Scheduler(DECODE, mask_token_id=MASK, eos_token_id=EOS, num_slots=2)
    requests = (GenerationRequest(str(n), tuple(prompt)) for n, prompt in enumerate(PROMPTS))
    ended = [done for done in decode_requests(requests, scheduler, engine) if isinstance(done, Completion)]
    return [list(done.canvas_token_ids) for done in sorted(ended, key=lambda done: done.id)]


def _find_none(storage: torch.UntypedStorage, num_bytes: int) -> None:
    raise torch.OutOfMemoryError("out of memory")


def run_rank(mesh: MeshConfig, name: str, models: list[str], output: str) -> None:
    engine = engine_of(name, models[0], mesh)
    found: list[Any] = [tokens_of(engine)]
    for model in models[1:]:
        for order in (ReadWeights(model), PutWeights()):
            assert carry_out(engine, order) is None
        found.append(tokens_of(engine))
    missing = ReadWeights(models[0] if engine.mesh.rank == 0 else "none")
    found.append([carry_out(engine, missing), tokens_of(engine)])
    assert carry_out(engine, ReleaseMemory()) is None
    resize = torch.UntypedStorage.resize_
    if engine.mesh.rank:  # this rank alone lacks memory
        torch.UntypedStorage.resize_ = _find_none  # type: ignore[method-assign, assignment]
    found.append([carry_out(engine, ResumeMemory()), sorted(engine.released)])
    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    assert carry_out(engine, ResumeMemory()) is None
    found.append(tokens_of(engine))
    Path(output, f"rank{engine.mesh.rank}.json").write_text(json.dumps(found))
    engine.close()
