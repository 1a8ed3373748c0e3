"""Pages of the CUDA engine on the CPU: requests that share a short pool decode what they decode alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import Completion, EngineCore, GenerationRequest, Rejection, Scheduler
from common.errors import ConfigError
from lopa_cuda.assemble import _num_pages, assemble
from lopa_cuda.engine import CudaEngine
from lopa_cuda.steps import PAGE_SIZE, CacheSizes
from tests.engine.lopa_cuda.test_cuda_padding import CallAgain

MODEL = Path(__file__).parents[2] / "golden" / "model_a"
PROFILE = DeviceProfile(name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=256)
LENGTHS = (5, 130, 60, 9, 190, 64, 63, 100)
PROMPTS = {str(n): tuple((7 * n + 3 * m) % 290 + 2 for m in range(length)) for n, length in enumerate(LENGTHS)}
DECODE = DecodeConfig(num_lookahead=2, block_size=16, max_new_tokens=64, stop_at_eos=False)


def make_engine(num_slots: int, num_pages: int | None = None, *, is_static: bool = False) -> CudaEngine:
    run = RunConfig(model=str(MODEL), max_num_requests=num_slots, decode=DECODE)
    return assemble(PROFILE, run, CallAgain() if is_static else None, num_pages)


def core_of(engine: CudaEngine, decode: DecodeConfig = DECODE) -> EngineCore:
    config = load_model_config(MODEL)
    scheduler = Scheduler(
        decode, mask_token_id=config.mask_token_id, eos_token_id=config.eos_token_id,
        num_slots=engine.capacity.num_slots,
    )  # fmt: skip
    return EngineCore(scheduler, engine)


def decode_all(engine: CudaEngine, decode: DecodeConfig = DECODE) -> tuple[dict[str, tuple[int, ...]], int]:
    """Tokens by request, and the most requests in a step."""
    core, most, tokens = core_of(engine, decode), 0, {}
    for name, prompt in PROMPTS.items():
        core.add_request(GenerationRequest(name, prompt))
    while core.has_work:
        for output in core.step():
            if isinstance(output.result, Completion):
                tokens[output.id] = output.result.canvas_token_ids
        most = max(most, len(core.scheduler.active))
    return tokens, most


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[int, ...]]:
    return decode_all(make_engine(1))[0]


@pytest.mark.parametrize("is_static", [False, True])
def test_a_pool_a_third_of_all_requests_at_their_longest(alone: dict[str, tuple[int, ...]], is_static: bool) -> None:
    engine = make_engine(6, 6 * 256 // PAGE_SIZE // 3, is_static=is_static)
    tokens, most = decode_all(engine)
    assert tokens == alone
    pages = engine.describe()["kv_pages"]
    assert pages["total"] == 8 >= pages["most_in_use"] > 4 and 1 < most < 6, "some waited"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"window_attention": "block_causal", "shift_row": "fresh"},
        {"strategy": {"name": "fast_dllm", "cache": "dual"}},
        {"strategy": "fast_dllm"},
        {"strategy": "vanilla"},
    ],
    ids=str,
)
def test_pages_hold_whatever_a_strategy_caches(settings: dict[str, str]) -> None:
    decode = DECODE.changed({"num_lookahead": 1, **settings})
    assert decode_all(make_engine(4, 9), decode)[0] == decode_all(make_engine(1), decode)[0]


def test_exhaustion_queues_in_order_and_aborts_make_room(alone: dict[str, tuple[int, ...]]) -> None:
    core = core_of(make_engine(4, 4))  # the longest request takes all pages
    for name in ("4", "0", "3"):
        core.add_request(GenerationRequest(name, PROMPTS[name]))
    core.step(), core.step()
    assert [decoding.request.id for decoding in core.scheduler.active] == ["4"]
    core.abort("4")
    results = {}
    while core.has_work:
        results |= {output.id: output.result for output in core.step() if output.result is not None}
    assert {name: result.canvas_token_ids for name, result in results.items() if name != "4"} == {
        name: alone[name] for name in ("0", "3")
    }


def test_a_request_that_needs_more_than_the_pool_is_rejected() -> None:
    core = core_of(make_engine(2, 3))
    core.add_request(GenerationRequest("4", PROMPTS["4"]))
    (output,) = core.step()
    assert isinstance(output.result, Rejection) and "do not fit the engine's KV memory" in output.result.reason


def test_random_arrivals_and_aborts_give_every_page_back(alone: dict[str, tuple[int, ...]]) -> None:
    engine, rng = make_engine(5, 7), np.random.default_rng(3)
    core, names, tokens = core_of(engine), list(PROMPTS), {}
    for _ in range(150):
        choice = rng.random()
        if choice < 0.2:
            name = names[int(rng.integers(len(names)))]
            if name not in core._queue.open_ids:
                core.add_request(GenerationRequest(name, PROMPTS[name]))
        elif choice < 0.25:
            core.abort(names[int(rng.integers(len(names)))])
        for output in core.step():
            if isinstance(output.result, Completion) and output.result.finish_reason != "abort":
                tokens[output.id] = output.result.canvas_token_ids
        table = engine.cache._pages
        held = [page for slot in range(5) for page in table.pages_of(slot)]
        assert len(set(held)) == len(held) == engine.cache.pool.num_used <= 7
    assert len(tokens) > 5 and all(alone[name] == found for name, found in tokens.items())


@pytest.mark.parametrize(("free_pages", "expected"), [(100, 12), (13.8, 12), (13.4, 11), (9.5, 8)])
def test_a_gpu_gets_as_many_pages_as_fit(monkeypatch: pytest.MonkeyPatch, free_pages: float, expected: int) -> None:
    """Three requests of four pages each, and a quarter page of staging memory, in 0.9 of what is free."""
    sizes = CacheSizes(2, 3, 256, 2, 16, torch.bfloat16, captured_tokens=16)
    free = int(free_pages * sizes.bytes_per_page)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
    assert _num_pages(sizes, torch.device("cuda"), 0.9) == expected
    assert _num_pages(sizes, torch.device("cpu"), 0.9) == 12


def test_a_gpu_that_cannot_hold_one_request_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = CacheSizes(28, 3, 4096, 4, 128, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (63 * sizes.bytes_per_page, 10**12))
    with pytest.raises(ConfigError, match=r"one request of 4096 positions needs 0\.2 GiB, 0\.2 GiB are free on cuda"):
        _num_pages(sizes, torch.device("cuda"), 1.0)
