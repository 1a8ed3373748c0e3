"""Requests of settings of their own, many at once: each gets the tokens that it gets alone, on both engines."""

from __future__ import annotations

import random
from typing import Any

import pytest
from completing import completions_of

from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import Engine, GenerationRequest
from common.platforms import build_engine
from tests.conftest import GOLDEN

MODEL = GOLDEN / "model_a"
AT_ONCE = 64
SHARED = DecodeConfig(window_attention="block_causal", num_lookahead=3, block_size=16, max_new_tokens=32)
DRAWN: list[dict[str, Any]] = [
    {}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.3, "top_k": 9},
    {"temperature": 0.4, "top_p": 0.95, "top_k": 40},
]  # fmt: skip


def requests_of(seed: int, count: int) -> list[GenerationRequest]:
    rng, requests = random.Random(seed), []
    for number in range(count):
        size = rng.choice([8, 16, 32])
        own = SHARED.model_copy(
            update={
                "num_lookahead": rng.choice([0, 1, 3, 7]),
                "block_size": size,
                "max_new_tokens": size * rng.randint(1, 32 // size + 1),
                "skip_threshold": rng.choice([0.5, 0.9]),
                "block_add_threshold": rng.choice([0.0, 0.1, 0.5]),
                "stop_at_eos": rng.random() < 0.5,
                "shift_row": rng.choice(["stale", "fresh"]),
                **rng.choice(DRAWN),
            }
        )
        prompt = tuple(rng.randrange(2, 290) for _ in range(rng.choice([3, 20, 90])))
        requests.append(GenerationRequest(str(number), prompt, decode=own, seed=rng.choice([None, 7])))
    return requests


def decoded(engine: Engine, requests: list[GenerationRequest]) -> dict[str, tuple[int, ...]]:
    found = completions_of(engine, MODEL, SHARED, requests)
    return {id: (done.num_forwards, *done.canvas_token_ids) for id, done in found.items()}


def engine_of(profile: DeviceProfile, engine: str, num_requests: int) -> Engine:
    run = RunConfig(model=str(MODEL), decode=SHARED, max_num_requests=num_requests)
    return build_engine(profile.model_copy(update={"engine": engine}), run)


@pytest.mark.parametrize("num_checked", [6, pytest.param(AT_ONCE, marks=pytest.mark.slow)])
def test_alone_or_among_63_others_of_different_settings(cpu: DeviceProfile, num_checked: int) -> None:
    requests = requests_of(seed=5, count=AT_ONCE)
    assert any(request.decode.temperature for request in requests[:num_checked])
    together = decoded(engine_of(cpu, "lopa_cuda", AT_ONCE), requests)
    engine = engine_of(cpu, "lopa_cuda", 1)
    for request in requests[:num_checked]:
        assert decoded(engine, [request])[request.id] == together[request.id], request.decode


@pytest.mark.parametrize("count", [12, pytest.param(AT_ONCE, marks=pytest.mark.slow)])
def test_both_engines_decode_mixed_requests_alike(cpu: DeviceProfile, count: int) -> None:
    requests = requests_of(seed=6, count=count)
    assert decoded(engine_of(cpu, "lopa_ascend", count), requests) == decoded(
        engine_of(cpu, "lopa_cuda", count), requests
    )
