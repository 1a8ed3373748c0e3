"""The ranks of a distributed test: decode every setting on a mesh, write what came out as JSON."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from common.config import DecodeConfig, MeshConfig, RunConfig
from common.decoding import Completion, GenerationRequest, Scheduler, decode_requests
from common.platforms import build_engine
from tests.distributed.ranks import cpu_profile

MODEL = Path(__file__).parents[1] / "golden" / "model_a"
MASK, EOS = 310, 300
PROMPTS = [[(13 * n * n + 7 * m + n) % 290 + 2 for m in range(9 + 6 * n)] for n in range(3)]


# Window attention, lookaheads, temperature and first row: each with each of the others at least once.
CASES = [
    ("full", 0, 0.0, "stale"), ("full", 3, 0.0, "stale"), ("full", 7, 0.0, "stale"), ("full", 3, 0.3, "stale"),
    ("full", 7, 1.0, "stale"), ("full", 3, 0.0, "fresh"), ("full", 3, 1.0, "fresh"), ("block_causal", 0, 1.0, "stale"),
    ("block_causal", 7, 0.0, "stale"), ("block_causal", 3, 1.0, "stale"), ("block_causal", 3, 0.3, "fresh"),
]  # fmt: skip


def settings() -> list[tuple[str, DecodeConfig]]:
    return [
        (
            f"{attention} k={k} T={temperature} {shift_row}",
            DecodeConfig(
                num_lookahead=k, block_size=16, max_new_tokens=32, window_attention=attention, temperature=temperature,
                top_p=0.9 if temperature == 1 else 1.0, shift_row=shift_row,
            ),
        )
        for attention, k, temperature, shift_row in CASES
    ]  # fmt: skip


def decode_all(engine: Any, decode: DecodeConfig) -> dict[str, Any]:
    """Tokens by request of this replica, and a digest of the committed KV after every step."""
    mesh = engine.mesh
    scheduler = Scheduler(decode, mask_token_id=MASK, eos_token_id=EOS, num_slots=2, seed=1)
    mine = [(n, prompt) for n, prompt in enumerate(PROMPTS) if n % mesh.dp_size == mesh.dp_rank]
    requests = iter([GenerationRequest(str(n), tuple(prompt)) for n, prompt in mine])
    engine.cache.committed.zero_()
    digests: list[str] = []
    commit = engine.commit

    def digesting_commit(plan: Any, winners: Any) -> None:
        commit(plan, winners)
        digests.append(hashlib.sha256(engine.cache.committed.numpy().tobytes()).hexdigest()[:16])

    engine.commit = digesting_commit
    results = list(decode_requests(requests, scheduler, engine))
    engine.commit = commit
    completions = [result for result in results if isinstance(result, Completion)]
    return {
        "tokens": {result.id: [result.canvas_token_ids, result.num_forwards] for result in completions},
        "kv": digests,
        "kv_sum": engine.cache.committed.double().abs().sum().item(),
    }


def run_rank(mesh: MeshConfig, output: str) -> None:
    engine: Any = build_engine(cpu_profile(mesh=mesh), RunConfig(model=str(MODEL), max_num_requests=2))
    results = {name: decode_all(engine, decode) for name, decode in settings()}
    place = {"dp": engine.mesh.dp_rank, "bp": engine.mesh.bp_rank, "tp": engine.mesh.tp_rank}
    Path(output, f"rank{engine.mesh.rank}.json").write_text(json.dumps({"place": place, "results": results}))
    engine.close()
