"""Requests that begin alike share KV: tokens and passes are those of a cold engine, on every family whose KV depends
on nothing that comes after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from completing import completions_of

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import Completion, Engine, ForgetKV
from common.decoding.engine import taking_orders
from common.platforms import build_engine
from tests.engine.families.test_dummy_weights import CONFIGS
from tests.engine.lopa_ascend.test_ascend_families import BLOCKS, CASES, FAMILIES
from tests.soaking import soaking

NUM_SHARED = 150  # tokens: two pages of 64, one of 128
FAST = CASES["fast_dllm_v2"][1]
OF_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: case for name, case in CASES.items() if name not in ("d2f of llada", "sdar, nothing cached")},
    "fast_dllm_v2, dual": (
        "fastdllm_v2/model_b", {**FAST, "strategy": {"name": "fast_dllm_v2", "sub_block_size": 8, "cache": "dual"}},
    ),
    "stable_diffcoder": ("", {**BLOCKS, "block_size": 4, "mask_token_id": 95}),
}  # fmt: skip
FEW = ("sdar", "llada2_2, revised")  # the others are slow only because they are many


def model_of(name: str, folder: Path) -> Path:
    if name:
        return FAMILIES / name
    config = {**CONFIGS["stable_diffcoder"], "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompts(model: Path) -> list[tuple[int, ...]]:
    """Eight that begin alike, one of them whole pages, and one that does not."""
    most = min(load_model_config(model).vocab_size, 512) - 20
    shared = tuple((11 * n * n + 5 * n) % most + 2 for n in range(NUM_SHARED))
    tails = [tuple((7 * n + m) % most + 2 for m in range(1 + 3 * n)) for n in range(6)]
    return [*(shared + tail for tail in tails), shared[:128], shared[:129], shared[1:]]


def configs(
    engine: str, model: Path, decode: DecodeConfig, count: int, load_format: str = "auto"
) -> tuple[DeviceProfile, RunConfig]:
    profile = DeviceProfile.model_validate(
        {"name": "test", "engine": engine, "device": "cpu", "dtype": "float32", "max_model_len": 512}
    )
    settings = {"model": str(model), "load_format": load_format, "decode": decode, "max_num_requests": count}
    return profile, RunConfig.model_validate(settings)


def decoded(
    engine: Engine, decode: DecodeConfig, model: Path, wanted: list[tuple[int, ...]], *, shares: bool,
    most: int | None = None,
) -> dict[str, Completion]:  # fmt: skip
    return completions_of(engine, model, decode, wanted, enable_prefix_caching=shares, max_num_batched_tokens=most)


def marks_of(case: str, engine: str, num_lookahead: int) -> Any:
    """Leave all but one engine and number of lookaheads to LOPA_SOAK=1, in turns."""
    if case in FEW and num_lookahead == (3 if case == "sdar" else 0):
        return ()
    is_turn = (num_lookahead == 0) == (engine == "lopa_cuda")
    return pytest.mark.slow if is_turn else soaking


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "engine", "num_lookahead"),
    [
        pytest.param(case, engine, k, marks=marks_of(case, engine, k))
        for case, (_, settings) in OF_FAMILIES.items()
        for engine in ("lopa_cuda", "lopa_ascend")
        for k in (0, 3)
        if engine == "lopa_cuda" or "dual" not in str(settings)
    ],
)
def test_hits_change_no_token(case: str, engine: str, num_lookahead: int, tmp_path: Path) -> None:
    name, settings = OF_FAMILIES[case]
    settings = {**settings, "num_lookahead": num_lookahead, "max_steps": 80}  # blocks of random weights never rest
    decode = DecodeConfig.model_validate(settings)
    model = model_of(name, tmp_path)
    wanted, load_format = prompts(model), "auto" if name else "dummy"
    built = build_engine(*configs(engine, model, decode, len(wanted), load_format))
    cold = decoded(built, decode, model, wanted, shares=False)
    together = decoded(built, decode, model, wanted, shares=True)
    alone = [decoded(built, decode, model, [prompt], shares=True)["0"] for prompt in wanted]
    for number, one in enumerate(alone):
        for found in (together[str(number)], one):
            assert found.canvas_token_ids == cold[str(number)].canvas_token_ids
            assert found.num_forwards == cold[str(number)].num_forwards
    page, size = 64 if engine == "lopa_cuda" else 128, decode.block_size
    usable = [(len(prompt) // size * size - 1) // page * page for prompt in wanted]
    usable = [*(min(length, NUM_SHARED // page * page) for length in usable[:-1]), usable[-1]]
    assert {cold[name].num_cached_tokens for name in cold} == {0}
    assert [together[str(number)].num_cached_tokens for number in range(len(wanted))] == [0, *usable[1:-1], 0]
    assert [found.num_cached_tokens for found in alone] == usable
    taking_orders(built).obey(ForgetKV())
    assert decoded(built, decode, model, wanted[:1], shares=True)["0"].num_cached_tokens == 0


@pytest.mark.parametrize("engine", ["lopa_cuda", "lopa_ascend"])
def test_hits_change_no_draw_of_prompts_in_parts(engine: str) -> None:
    """A prompt of 150 tokens takes passes of 40; with a hit it takes fewer, and the passes after them draw alike."""
    name, settings = OF_FAMILIES["sdar"]
    decode = DecodeConfig.model_validate({**settings, "num_lookahead": 3, "temperature": 0.8})
    model = model_of(name, Path())
    wanted = prompts(model)[4:6]
    built = build_engine(*configs(engine, model, decode, len(wanted)))
    cold = decoded(built, decode, model, wanted, shares=False, most=40)
    (first,) = decoded(built, decode, model, wanted[:1], shares=True, most=40).values()
    warm = decoded(built, decode, model, wanted, shares=True, most=40)
    assert first.num_cached_tokens == 0 and first.num_forwards == cold["0"].num_forwards
    for number, found in warm.items():
        assert found.canvas_token_ids == cold[number].canvas_token_ids
        assert found.num_forwards == cold[number].num_forwards - 128 // 40 and found.num_cached_tokens == 128
