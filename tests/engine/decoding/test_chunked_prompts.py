"""A prompt that is cut into several passes gives the tokens of one that is not, and holds nobody up for longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from completing import completions_of

from common.checkpoint import load_model_config
from common.config import BlockDiffusion, DecodeConfig, DeviceProfile, FastDllmV2, RunConfig
from common.decoding import Completion, Scheduler, StepPlan
from common.platforms import build_engine

ROOT = Path(__file__).parents[3]
BLOCK = ROOT / "models" / "demo_block"
FAST = ROOT / "tests" / "golden_families" / "fastdllm_v2" / "model_a"
LONG = tuple(40 + 7 * n % 800 for n in range(203))
SHORT = tuple(40 + 3 * n % 500 for n in range(21))


def decode_of(name: str) -> DecodeConfig:
    shared: dict[str, Any] = {"block_size": 16, "max_new_tokens": 48, "skip_threshold": 0.6}
    if name == "sub-blocks":
        settings = {**shared, "block_size": 32, "mask_token_id": 511, "eos_token_id": 510}
        return DecodeConfig(strategy=FastDllmV2(cache="dual"), num_lookahead=0, **settings)
    commit: Any = "separate" if name == "separate" else "fused"
    return DecodeConfig(strategy=BlockDiffusion(commit=commit), num_lookahead=3, **shared)


def model_of(name: str) -> Path:
    return FAST if name == "sub-blocks" else BLOCK


def decoded(cpu: DeviceProfile, name: str, most: int, prompts: list[tuple[int, ...]]) -> dict[str, Completion]:
    decode, vocab_size = decode_of(name), load_model_config(model_of(name)).vocab_size
    run = RunConfig(model=str(model_of(name)), decode=decode, max_num_requests=len(prompts))
    known = [[token % (vocab_size - 20) for token in prompt] for prompt in prompts]
    return completions_of(build_engine(cpu, run), model_of(name), decode, known, max_num_batched_tokens=most)


@pytest.mark.parametrize("name", ["fused", "separate", "sub-blocks", "on Ascend"])
def test_a_cut_prompt_changes_no_token(cpu: DeviceProfile, name: str) -> None:
    if name == "on Ascend":
        cpu = DeviceProfile(name="test", engine="lopa_ascend", device="cpu", dtype="float32", max_model_len=512)
    whole, cut = (decoded(cpu, name, most, [LONG])["0"] for most in (8192, 64))
    assert cut.canvas_token_ids == whole.canvas_token_ids
    assert cut.num_forwards == whole.num_forwards + 2, "192 positions are three passes of 64"
    assert cut.tokens_per_step[:2] == (0, 0)


def test_among_others_too(cpu: DeviceProfile) -> None:
    alone = [decoded(cpu, "fused", 8192, [prompt])["0"].token_ids for prompt in (SHORT, LONG, SHORT[:5])]
    together = decoded(cpu, "fused", 32, [SHORT, LONG, SHORT[:5]])
    assert [together[str(n)].token_ids for n in range(3)] == alone


def test_no_pass_holds_more_prompt_tokens_than_allowed(cpu: DeviceProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts that come together wait for each other."""
    widths: list[int] = []
    plan_step = Scheduler.plan_step

    def watched(self: Scheduler) -> StepPlan:
        plan = plan_step(self)
        widths.append(sum(span.length for span in plan.commits))
        return plan

    monkeypatch.setattr(Scheduler, "plan_step", watched)
    found = decoded(cpu, "fused", 64, [LONG] * 3)
    assert len({result.token_ids for result in found.values()}) == 1 and len(found) == 3
    assert max(widths) <= 64 + 2 * 16, "finished blocks of the others may be written beside a chunk"
