"""Static shapes on the CPU: padded tokens and reads change no prediction, nor do rows of other requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from completing import completions_of

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import StepPlan
from common.errors import EngineError
from common.runtime import synthetic_plan
from lopa_cuda.assemble import assemble
from lopa_cuda.engine import CudaEngine
from lopa_cuda.steps import Share

MODEL = Path(__file__).parents[2] / "golden" / "model_a"
PROFILE = DeviceProfile(name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=256)


class CallAgain:
    """A capture for the CPU: replaying is calling, on the same static buffers."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def allocated_bytes(self) -> int:
        return 0


def test_more_memory_than_there_is_is_one_sentence() -> None:
    with pytest.raises(
        EngineError, match=r"the KV cache of 1000000000000 requests of 256 positions needs .* GiB, which"
    ):
        make_engine(is_static=False, num_slots=10**12)


def make_engine(*, is_static: bool, num_slots: int = 1, profile: DeviceProfile = PROFILE) -> CudaEngine:
    run = RunConfig(model=str(MODEL), max_num_requests=num_slots, decode=DecodeConfig(block_size=8, max_new_tokens=64))
    engine = assemble(profile, run, CallAgain() if is_static else None)
    if is_static:
        engine.kv.warm_up([8, 16])  # which only operators that take lengths from the device do by themselves
    return engine


def decode(engine: CudaEngine, prompts: list[tuple[int, ...]], **settings: object) -> dict[str, tuple[int, ...]]:
    decode = DecodeConfig(block_size=8, max_new_tokens=64, stop_at_eos=False, **settings)  # type: ignore[arg-type]
    return {id: done.canvas_token_ids for id, done in completions_of(engine, MODEL, decode, prompts).items()}


PROMPTS = [tuple(range(10, 10 + length)) for length in (5, 23, 60, 9)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"num_lookahead": 3},
        {"num_lookahead": 3, "shift_row": "fresh"},
        {"num_lookahead": 2, "window_attention": "block_causal"},
        {"num_lookahead": 2, "strategy": {"name": "fast_dllm", "cache": "dual"}},
        {"num_lookahead": 1, "temperature": 0.8, "top_p": 0.9},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_padded_passes_decode_the_same_tokens(settings: dict[str, object]) -> None:
    plain = decode(make_engine(is_static=False), PROMPTS[:2], **settings)
    padded = decode(make_engine(is_static=True), PROMPTS[:2], **settings)
    assert padded == plain


def test_requests_of_different_length_share_steps_without_touching_one_another() -> None:
    alone = [decode(make_engine(is_static=False), [prompt], num_lookahead=2)["0"] for prompt in PROMPTS]
    together = decode(make_engine(is_static=True, num_slots=3), PROMPTS, num_lookahead=2)
    assert [together[str(number)] for number in range(len(PROMPTS))] == alone


def test_padding_never_reaches_what_is_read() -> None:
    engine, plan = make_engine(is_static=True), a_plan(num_rows=3, width=19)
    first = engine.forward(plan)
    (buffers,) = [entry.buffers for entry in engine.layers._entries.values()]
    assert buffers._entries_3T.shape[1] > plan.num_tokens
    fill = buffers.fill

    def fill_with_other_tokens(plan: StepPlan, share: Share) -> None:
        fill(plan, share)
        buffers._entries_3T[:2, plan.num_tokens :] = 3

    buffers.fill = fill_with_other_tokens  # type: ignore[method-assign]
    again = engine.forward(plan)
    assert np.array_equal(first.token_T[plan.is_read_T], again.token_T[plan.is_read_T])
    torch.testing.assert_close(first.confidence_T[plan.is_read_T], again.confidence_T[plan.is_read_T])


@pytest.mark.parametrize("shift_row", ["stale", "fresh"])
def test_a_prompt_shares_a_pass_with_decoding_rows(shift_row: str) -> None:
    """What each of two requests computes alone it computes beside the other, whose first step comes later."""
    engine, alone = make_engine(is_static=True, num_slots=2), make_engine(is_static=False)
    num_tokens: list[set[int]] = []
    launch = engine.launch

    def noting(plan: StepPlan) -> None:
        num_tokens.append(set(plan.num_entries_R.tolist()))
        launch(plan)

    engine.launch = noting  # type: ignore[method-assign]
    together = decode(engine, PROMPTS, num_lookahead=2, shift_row=shift_row)
    expected = [decode(alone, [prompt], num_lookahead=2, shift_row=shift_row)["0"] for prompt in PROMPTS]
    assert [together[str(number)] for number in range(len(PROMPTS))] == expected
    assert any(max(widths) >= 9 > min(widths) for widths in num_tokens)


def a_plan(num_rows: int, width: int) -> StepPlan:
    config = load_model_config(MODEL)
    return synthetic_plan(config, num_rows=num_rows, width=width, num_cached=0, read_share=0.5)
