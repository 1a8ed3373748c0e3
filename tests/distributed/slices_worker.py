"""The ranks of a distributed test: decode on a mesh with every pass of prompts cut over the
branch ranks, however short it is. Writes tokens, digests of the KV and lengths of passes as JSON."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, MeshConfig, RunConfig
from common.decoding import Completion, GenerationRequest, Int, Scheduler, StepPlan, decode_requests
from common.platforms import build_engine
from common.runtime import facts_of
from lopa_cuda.steps import slices
from tests.distributed.ranks import cpu_profile

TESTS = Path(__file__).parents[1]
PROMPTS = [[(13 * n * n + 7 * m + n) % 290 + 2 for m in range(20 + 41 * n)] for n in range(3)]


NUM_SLOTS = (1, 3)  # prompts alone, together, and beside decoding rows


class Case(NamedTuple):
    """most: tokens of prompts in a pass."""

    model: str
    settings: dict[str, Any]
    most: int = 8192


D2F: dict[str, Any] = {"num_lookahead": 3, "block_size": 16, "max_new_tokens": 16}
CAUSAL = {**D2F, "window_attention": "block_causal"}
BLOCKS: dict[str, Any] = {"num_lookahead": 3, "block_size": 16, "max_new_tokens": 16, "mask_token_id": 511}
# All of a prompt's positions see all of it, or its blocks what lies before; dense and MoE; whole prompts and pieces.
CASES = {
    "full": Case("golden/model_a", D2F),
    "full drawn": Case("golden/model_a", {**D2F, "temperature": 0.7}),
    "full fresh": Case("golden/model_a", {**D2F, "shift_row": "fresh"}),
    "causal": Case("golden/model_a", CAUSAL),
    "causal fresh": Case("golden/model_a", {**CAUSAL, "shift_row": "fresh"}),
    "nothing cached": Case("golden/model_a", {**D2F, "num_lookahead": 0, "strategy": "vanilla"}),
    "llada dual": Case("golden_families/llada/model_a", {**BLOCKS, "strategy": {"name": "fast_dllm", "cache": "dual"}}),
    "sdar": Case("golden_families/sdar/model_a", {**BLOCKS, "strategy": "block_diffusion"}),
    "sdar pieces": Case("golden_families/sdar/model_a", {**BLOCKS, "strategy": "block_diffusion"}, most=64),
    "llada2 experts": Case("golden_families/llada2/model_a", {**BLOCKS, "strategy": "block_diffusion"}),
    "llada2_2 experts by block": Case("golden_families/llada2_2/model_b", {**BLOCKS, "strategy": "block_diffusion"}),
    "fast_dllm_v2 pieces": Case(
        "golden_families/fastdllm_v2/model_a",
        {**BLOCKS, "strategy": {"name": "fast_dllm_v2", "sub_block_size": 8, "cache": "dual"}},
        most=64,
    ),
}


def decode_all(profile: DeviceProfile, case: Case, num_slots: int) -> dict[str, Any]:
    """Tokens and passes by request, digests of the committed KV, and [entries of the plan, tokens of the rank's pass,
    whether it was cut] of every pass that began with a prompt."""
    decode = DecodeConfig.model_validate({"stop_at_eos": False, **case.settings})
    run = RunConfig(model=str(TESTS / case.model), decode=decode, max_num_requests=num_slots)
    engine: Any = build_engine(profile, run)
    config = load_model_config(TESTS / case.model)
    scheduler = Scheduler(
        decode, mask_token_id=config.mask_of(decode.mask_token_id), eos_token_id=None, num_slots=num_slots, seed=1,
        max_num_batched_tokens=case.most, facts=facts_of(config),
    )  # fmt: skip
    digests: list[str] = []
    passes: list[tuple[int, int, bool]] = []
    launch, commit = engine.launch, engine.commit

    def noting_launch(plan: StepPlan) -> None:
        launch(plan)
        if (plan.step_R == 0).any():
            passes.append((plan.num_tokens, engine.last_num_tokens(), engine.kv.staged.is_whole))

    def digesting_commit(plan: StepPlan, winners: Int) -> None:
        commit(plan, winners)
        digests.append(hashlib.sha256(engine.cache.committed.numpy().tobytes()).hexdigest()[:16])

    engine.launch, engine.commit = noting_launch, digesting_commit
    mine = [(n, prompt) for n, prompt in enumerate(PROMPTS) if n % engine.mesh.dp_size == engine.mesh.dp_rank]
    requests = iter([GenerationRequest(str(n), tuple(prompt)) for n, prompt in mine])
    ended = [result for result in decode_requests(requests, scheduler, engine) if isinstance(result, Completion)]
    engine.close()
    tokens = {done.id: [list(done.canvas_token_ids), done.num_forwards] for done in ended}
    return {"tokens": tokens, "kv": digests, "passes": passes}


def run_rank(mesh: MeshConfig, name: str, num_slots: int, output: str) -> None:
    slices.LEAST_SAVED = 1
    result = decode_all(cpu_profile(mesh=mesh), CASES[name], num_slots)
    Path(output, f"{name}.{num_slots}.{os.environ['RANK']}.json").write_text(json.dumps(result))
