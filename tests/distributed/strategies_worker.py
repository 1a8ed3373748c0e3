"""The ranks of a distributed test: decode every family's tiny model by its strategies on a mesh."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, MeshConfig, RunConfig
from common.decoding import Completion, GenerationRequest, Scheduler, decode_requests
from common.platforms import build_engine
from common.runtime import facts_of
from tests.distributed.ranks import cpu_profile

MODELS = Path(__file__).parents[1] / "golden_families"
MASK = 511
PROMPTS = [[(13 * n * n + 7 * m + n) % 490 + 2 for m in range(9 + 12 * n)] for n in range(2)]
LONG = [(5 * n * n + 11 * n) % 490 + 2 for n in range(170)]
ALL = [*PROMPTS, LONG, [*LONG[:165], 7]]  # with two that share a page of either engine
SHARED = {"max_new_tokens": 24, "skip_threshold": 0.3, "sampling_strategy": "default", "eos_token_id": -1}
# One of each kind: dense and MoE, with and without shift, committing in the next pass, in its own, tentatively, never.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sdar fused": ("sdar/model_a", {"strategy": "block_diffusion", "block_size": 16}),
    "sdar separate": ("sdar/model_b", {"strategy": {"name": "block_diffusion", "commit": "separate"}, "block_size": 8}),
    "llada2 edits": (
        "llada2/model_a",
        {"strategy": {"name": "block_diffusion", "edit_threshold": 0.6}, "block_size": 16},
    ),
    "llada2_2 revised": (
        "llada2_2/model_a",
        {"strategy": {"name": "levenshtein", "edit_threshold": 0.4, "max_post_edit_steps": 6}, "block_size": 32},
    ),
    "llada2_2 as fluxserve": (
        "llada2_2/model_a",
        {"strategy": {"name": "levenshtein", "variant": "fluxserve", "max_post_edit_steps": 4}, "block_size": 32},
    ),
    "fast_dllm_v2 dual": (
        "fastdllm_v2/model_a",
        {"strategy": {"name": "fast_dllm_v2", "sub_block_size": 8, "cache": "dual"}, "block_size": 16},
    ),
    "llada dual": ("llada/model_a", {"strategy": {"name": "fast_dllm", "cache": "dual"}, "block_size": 16}),
    "llada multi_block": (
        "llada/model_a",
        {
            "strategy": {"name": "multi_block", "cache_delay": 1},
            "block_size": 8,
            "fill_rule": "entropy(below=0.5)",
            "sampling_strategy": "neg_entropy",
        },
    ),
    "llada d2f": ("llada/model_a", {"strategy": "d2f", "block_size": 16, "window_attention": "block_causal"}),
}
Decoded = dict[str, dict[str, Any]]
REVISING = frozenset(name for name, (_, own) in CASES.items() if "levenshtein" in str(own))  # greedy, without formats


def decode_all(profile: DeviceProfile, name: str, num_slots: int = 2, *, shares: bool = True) -> Decoded:
    """Tokens and passes of one case by number of lookaheads, and request of this replica. shares: with a cache of
    prefixes, where the strategy allows one."""
    decoded, (model, own) = {}, CASES[name]
    most = DecodeConfig.model_validate({**SHARED, **own, "num_lookahead": 7})
    engine: Any = build_engine(profile, RunConfig(model=str(MODELS / model), decode=most, max_num_requests=num_slots))
    facts = facts_of(load_model_config(MODELS / model))
    mine = [(n, prompt) for n, prompt in enumerate(ALL) if n % engine.mesh.dp_size == engine.mesh.dp_rank]
    for k in (0, 3, 7):
        decode = DecodeConfig.model_validate({**SHARED, **own, "num_lookahead": k})
        scheduler = Scheduler(
            decode, mask_token_id=MASK, eos_token_id=None, num_slots=num_slots, facts=facts,
            enable_prefix_caching=shares,
        )  # fmt: skip
        requests = iter([GenerationRequest(str(n), tuple(prompt)) for n, prompt in mine])
        results = list(decode_requests(requests, scheduler, engine))
        completions = [result for result in results if isinstance(result, Completion)]
        assert scheduler.num_hit >= 128 * (scheduler.num_queried > 0 and k > 0), "found what k = 0 has left"
        decoded[f"k={k}"] = {done.id: [list(done.canvas_token_ids), done.num_forwards] for done in completions}
    engine.close()
    return decoded


def run_rank(mesh: MeshConfig, engine: str, name: str, output: str) -> None:
    Path(output, f"{name} {os.environ['RANK']}.json").write_text(
        json.dumps(decode_all(cpu_profile(engine, mesh), name))
    )
