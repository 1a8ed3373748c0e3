"""The shipped model on the Ascend engine's ref lane: the CUDA engine's tokens, in float32 and in bfloat16.

In 8 bits free-running decodings part ways at the first near tie, so decisions are compared step by step: both engines
see the same step, and the tokens that the first one's predictions fill are looked up in the other's. A hundred problems
on the simulated device: tests/npu/test_npu_accuracy.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from started import python

from common.checkpoint import load_model_config, load_tokenizer
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import (
    Completion,
    Engine,
    GenerationRequest,
    Int,
    Predictions,
    Scheduler,
    StepPlan,
    StepRecord,
    decode_requests,
)
from common.decoding.scheduling.by_request import view_of
from common.platforms import build_engine
from tests.soaking import soaking

ISA = "ONEDNN_MAX_CPU_ISA"
DEMO = Path(__file__).parents[3] / "models" / "demo"
DECODE = DecodeConfig(
    num_lookahead=3, block_size=16, max_new_tokens=192, skip_threshold=0.95, window_attention="block_causal",
    shift_row="fresh",
)  # fmt: skip

pytestmark = pytest.mark.skipif(not (DEMO / "config.json").is_file(), reason="models/demo holds no checkpoint")


def engine_of(engine: str, dtype: str, quantization: str | None = None) -> Engine:
    profile = DeviceProfile.model_validate(
        {
            "name": "test", "engine": engine, "device": "cpu", "dtype": dtype, "quantization": quantization,
            "max_model_len": 320,
        }
    )  # fmt: skip
    return build_engine(profile, RunConfig(model=str(DEMO), decode=DECODE, max_num_requests=5))


def scheduler_of(**options: Any) -> Scheduler:
    """Return a scheduler with four slots, whose steps `Decisions` looks into."""
    config = load_model_config(DEMO)
    return Scheduler(
        DECODE, mask_token_id=config.mask_token_id, eos_token_id=config.eos_token_id, num_slots=4, **options
    )


def requests(num_math: int, num_code: int) -> Iterator[GenerationRequest]:
    tokenizer = load_tokenizer(str(DEMO))
    for name, count in (("math", num_math), ("code", num_code)):
        lines = (DEMO / f"heldout_{name}.jsonl").read_text().splitlines()[:count]
        for number, line in enumerate(lines):
            prompt = tokenizer.encode(json.loads(line)["question"] + "\n")
            yield GenerationRequest(f"{name}{number}", tuple(prompt))


def tokens_of(engine: Engine) -> dict[str, tuple[int, ...]]:
    results = decode_requests(requests(2, 1), scheduler_of(), engine)
    return {result.id: result.canvas_token_ids for result in results if isinstance(result, Completion)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tokens_are_those_of_the_cuda_engine(dtype: str) -> None:
    """Both round at the same points in bfloat16; 99% of the positions would be enough.

    oneDNN's AVX-512 kernels add a bf16 product's terms in an order that follows from its depth, so that the zeros with
    which one engine pads heads change the last bit. Which kernels it takes is decided when torch loads.
    """
    if dtype == "bfloat16" and os.environ.get(ISA) != "AVX2":
        chosen = ["-q", "-p", "no:cacheprovider", __file__, "-k", "cuda and bfloat16"]
        done = python("-m", "pytest", *chosen, env={ISA: "AVX2"})
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-2000:]
        return
    found = tokens_of(engine_of("lopa_ascend", dtype))
    assert found == tokens_of(engine_of("lopa_cuda", dtype))
    assert len(found) == 3


class Decisions:
    """An engine, and beside it another one that is asked the same: how many filled tokens would have been the same."""

    def __init__(self, leader: Engine, follower: Engine) -> None:
        self.leader, self.follower = leader, follower
        self.capacity, self.mesh = replace(leader.capacity, gives_logprobs=False), leader.mesh
        self.scheduler = scheduler_of(observer=self.observe)
        self.num_filled = self.num_equal = 0

    def forward(self, plan: StepPlan) -> Predictions:
        self.found = self.follower.forward(plan)
        return self.leader.forward(plan)

    def commit(self, plan: StepPlan, winners: Int) -> None:
        self.token_of, requests = {}, self.scheduler._requests
        for decoding, winner in zip(self.scheduler.active, winners.tolist(), strict=True):
            view = view_of(decoding, requests._store.loops, self.found, plan.row_fields_8R)
            branch = winner - int(requests._store.loops.states[decoding.slot]["first_row"])
            token_W = view.scoring.values_3BW[0, branch].astype(int)
            self.token_of[decoding.request.id] = dict(enumerate(token_W.tolist(), view.start))
        self.leader.commit(plan, winners)
        self.follower.commit(plan, winners)

    def observe(self, record: StepRecord) -> None:
        token_of = self.token_of[record.request_id]
        self.num_filled += len(record.filled)
        self.num_equal += sum(token_of[position] == token for position, token in record.filled.items())

    def decode(self) -> float:
        list(decode_requests(requests(3, 1), self.scheduler, self))  # type: ignore[arg-type]
        assert self.num_filled > 200
        return self.num_equal / self.num_filled


@soaking
def test_in_8_bits_the_tokens_of_a_step_are_nearly_those_of_bfloat16() -> None:
    share = Decisions(engine_of("lopa_ascend", "bfloat16"), engine_of("lopa_ascend", "bfloat16", "w8a8")).decode()
    print(f"lopa_ascend W8A8 fills {share:.2%} of the positions as lopa_ascend bfloat16 does")
    assert share >= 0.97
