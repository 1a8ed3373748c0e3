"""The ranks of a distributed test: log probabilities of every family's tiny model, as the first rank has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, MeshConfig
from common.decoding import TextScorer
from tests.distributed.ranks import cpu_profile
from tests.distributed.strategies_worker import MASK, MODELS, PROMPTS, SHARED
from tests.telling import FAMILIES, Decoded

SETTINGS = [(7, 0.0), (3, 0.8), (0, 0.0)]  # lookaheads, of which the engine is built for the most, and temperature


def told(decoded: Decoded) -> dict[str, Any]:
    return {
        id: {
            "tokens": [done.num_forwards, *done.token_ids],
            "steps": list(done.step_map),
            "logprobs": [one.logprob for one in done.logprobs],
            "best": [[token for token, _ in one.top] for one in done.logprobs],
        }
        for id, done in decoded.completions.items()
    }


def told_of(profile: DeviceProfile, name: str) -> tuple[list[dict[str, Any]], Any]:
    """What each setting gives, and the engine."""
    engine: Any = None
    found = []
    for k, temperature in SETTINGS:
        decoded = Decoded(profile, name, k, temperature, engine=engine)
        engine = decoded.engine
        found.append(told(decoded))
    return [*found, {"likelihoods": likelihoods(engine, name)}], engine


def likelihoods(engine: Any, name: str) -> list[float]:
    """The likelihoods of two texts, in few maskings."""
    model, own = FAMILIES[name]
    decode = DecodeConfig.model_validate({**SHARED, **own, "num_lookahead": 0})
    scorer = TextScorer(
        engine, decode, mask_token_id=MASK, shift=load_model_config(MODELS / model).shift, num_maskings=6, seed=1,
        most_tokens=200,
    )  # fmt: skip
    texts = [(prompt, [(5 * place + n) % 490 for place in range(7)]) for n, prompt in enumerate(PROMPTS)]
    return [one.logprob for one in scorer.scores(texts)]


def run_rank(mesh: MeshConfig, engine_name: str, name: str, output: str) -> None:
    found, engine = told_of(cpu_profile(engine_name, mesh), name)
    if engine.mesh.is_leader:
        Path(output, f"{name}.json").write_text(json.dumps(found))
    engine.close()
