"""The ranks of a distributed test: answers held to a format, on any mesh and engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, MeshConfig, RunConfig
from common.constraints import Compiler, Format, made
from common.decoding import GenerationRequest, Scheduler, decode_requests
from common.platforms import build_engine
from common.runtime import facts_of
from tests.distributed.ranks import cpu_profile
from tests.distributed.strategies_worker import CASES, MASK, MODELS

EOS = 1
TEXTS = ["yes", "no", "not sure", "12 or 20 of these"]
COMPILER = Compiler(lambda: {2 + byte: bytes([byte]) for byte in range(256)} | {258: b"not ", 259: b"12"}, 512, made)
CASE = "sdar fused"


def decode_all(profile: DeviceProfile) -> dict[str, list[int]]:
    """Tokens of requests with and without a format, by temperature and request."""
    model, own = CASES[CASE]
    decoded: dict[str, list[int]] = {}
    settings = {"max_new_tokens": 32, "skip_threshold": 0.3, "num_lookahead": 3, "eos_token_id": EOS, **own}
    decode = DecodeConfig.model_validate(settings)
    engine: Any = build_engine(profile, RunConfig(model=str(MODELS / model), decode=decode, max_num_requests=2))
    automaton = COMPILER.automaton(Format("choice", json.dumps(TEXTS)))
    for temperature in (0.0, 0.8):
        decode = DecodeConfig.model_validate({**settings, "temperature": temperature})
        facts = facts_of(load_model_config(MODELS / model))
        scheduler = Scheduler(decode, mask_token_id=MASK, eos_token_id=EOS, num_slots=2, facts=facts)
        requests = [
            GenerationRequest(str(n), tuple(range(10, 20 + 7 * n)), automaton=None if n == 1 else automaton)
            for n in range(3)
        ]
        for done in decode_requests(iter(requests), scheduler, engine):
            decoded[f"{temperature} {done.id}"] = list(done.token_ids)
    engine.close()
    return decoded


def run_rank(mesh: MeshConfig, engine: str, output: str) -> None:
    Path(output, f"{os.environ['RANK']}.json").write_text(json.dumps(decode_all(cpu_profile(engine, mesh))))
