"""Any number in any setting: one sentence that names the setting, or a decoding that ends with finite statistics, as do
the requests beside it."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import bounded, fuzzed
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, FastDllm, RunConfig, problem
from common.decoding import Completion, Engine, GenerationRequest, Predictions, Rejection, Scheduler, decode_requests
from common.decoding.scheduling.scheduler import SHARED_SETTINGS
from common.errors import ConfigError
from common.platforms import build_engine
from common.runtime import facts_of
from common.runtime.fitting import check_decode
from tests.conftest import GOLDEN

DREAM, FAMILIES = GOLDEN / "model_a", GOLDEN.parent / "golden_families"
PROMPT = tuple(json.loads((GOLDEN / "01_d2f_full_k0.json").read_text())["prompt"][:9])
CPU = DeviceProfile(name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=256)
SMALL = {"num_lookahead": 2, "block_size": 8, "max_new_tokens": 16}
EDITED = {"name": "block_diffusion", "edit_threshold": 0.5}
# Between them every number acts somewhere.
CASES: tuple[tuple[Path, dict[str, Any]], ...] = (
    (DREAM, {}),
    (DREAM, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}),
    (DREAM, {"temperature": 0.7, "temperature_acts_on": "draw_and_confidence", "sampling_strategy": "logit_margin"}),
    (DREAM, {"branch_score": "mean(bottom_share=0.5, created=0.5)", "sampling_strategy": "margin"}),
    (DREAM, {"strategy": {"name": "fast_dllm", "max_block_steps": 8}, "fill_rule": "dynamic(steps=4)"}),
    (DREAM, {"strategy": "fast_dllm", "fill_rule": "entropy_bounded"}),
    (DREAM, {"strategy": "fast_dllm", "fill_rule": "factor", "temperature": 1.0}),
    (DREAM, {"strategy": {"name": "fast_dllm", "cache": "none", "cfg_scale": 1.0}, "temperature": 1.0}),
    (DREAM, {"strategy": "multi_block", "fill_rule": "entropy"}),
    (FAMILIES / "sdar" / "model_a", {"strategy": {**EDITED, "penalty_lambda": 1.0}}),
    (FAMILIES / "sdar" / "model_a", {"strategy": EDITED, "temperature": 1.0}),
    (
        FAMILIES / "fastdllm_v2" / "model_a",
        {"strategy": {"name": "fast_dllm_v2", "sub_block_size": 4}, "mask_token_id": 511},
    ),
)
POLICIES = {
    "branch_score": (
        "mean(bottom_share={})",
        "mean(created={})",
        "expected(trust={})",
        "expected(soon={})",
        "hedged(risk={})",
        "num_sure(soon={})",
    ),
    "spawn_rule": ("mixed(share={})", "near(probability={})", "confident(blocks={})"),
    "fill_rule": ("agreed(share={})", "entropy(below={})"),
    "lookahead_rule": ("stalled(plenty={})", "stalled(share={})"),
}
EDGES = (
    0.0, -0.0, 5e-324, 1e-320, 1e-46, 1e-40, 5e-38, 1.2e-38, 9.99e-4, 1e-3, 1 - 1e-12, 1.0, 256.0, 1e6, 1e30, 3.3e38,
    3.5e38, 1e308, math.inf, math.nan,
)  # fmt: skip
FLOATS = st.sampled_from([*EDGES, *(-edge for edge in EDGES)]) | st.floats() | st.floats(0, 1)
INTS = st.sampled_from([0, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, -(2**63), 10**400]) | st.integers(-3, 300)
NUMBERS = FLOATS | INTS | st.booleans()


def numbers_of(model: type[Any]) -> list[str]:
    fields = model.model_fields.items()
    return [name for name, field in fields if {int, float} & {field.annotation, *typing.get_args(field.annotation)}]


@dataclass
class Loaded:
    """A model, and whether all that was read of its passes was finite."""

    engine: Engine
    config: Any
    is_finite: bool = True

    def decode(self, decode: DecodeConfig, beside: DecodeConfig) -> Completion | Rejection:
        """Decode by these settings beside three requests of others, which end whatever becomes of this one."""
        scheduler = Scheduler(
            beside, mask_token_id=self.config.mask_of(beside.mask_token_id), eos_token_id=self.config.eos_token_id,
            num_slots=4, facts=facts_of(self.config),
        )  # fmt: skip
        requests = [GenerationRequest("", PROMPT, decode), *(GenerationRequest(str(n), PROMPT[n:]) for n in range(3))]
        self.is_finite = True
        ended = {result.id: result for result in decode_requests(iter(requests), scheduler, self.engine)}
        own = ended.pop("")
        assert len(ended) == 3 and all(isinstance(result, Completion) for result in ended.values())
        return own


@cache
def loaded(model: Path) -> Loaded:
    config = load_model_config(model)
    decode = {"strategy": "fast_dllm" if config.block_origin != "zero" else "block_diffusion", **SMALL}
    if config.shift and config.block_origin == "zero":
        decode["strategy"] = "fast_dllm_v2"
    run = RunConfig(model=str(model), decode=DecodeConfig.model_validate(decode), max_num_requests=4)
    found = Loaded(build_engine(CPU, run), config)
    forward = found.engine.forward

    def watched(plan: Any) -> Predictions:
        predictions = forward(plan)
        found.is_finite &= bool(np.isfinite(predictions.values_3T[:, plan.is_read_T]).all())
        return predictions

    found.engine.forward = watched  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    for model, _ in CASES:
        loaded(model).engine.close()


def check(model: Path, settings: Mapping[str, Any], name: str, value: object) -> None:
    """name: the setting that has the drawn value."""
    try:
        decode = DecodeConfig.model_validate({**SMALL, **settings, name: value})
        check_decode(decode, CPU, loaded(model).config)
    except ValidationError as error:
        sentence = problem(error, DecodeConfig)
        assert name in sentence and "\n" not in sentence
        return
    except ConfigError as error:
        assert name in str(error) and "\n" not in str(error)
        return
    shared = {name: value} if name in SHARED_SETTINGS else {}
    with bounded():
        result = loaded(model).decode(decode, DecodeConfig.model_validate({**SMALL, **settings, **shared}))
    if isinstance(result, Rejection):  # for want of room
        assert name in ("block_size", "max_new_tokens") and "\n" not in result.reason
    else:
        assert loaded(model).is_finite and result.finish_reason in ("eos", "length", "max_steps")


@fuzzed
@given(case=st.sampled_from(CASES), name=st.sampled_from(numbers_of(DecodeConfig)), value=NUMBERS)
def test_of_a_setting(case: tuple[Path, dict[str, Any]], name: str, value: float) -> None:
    check(*case, name, value)


@fuzzed
@given(
    policy=st.sampled_from([(name, call) for name, calls in POLICIES.items() for call in calls]),
    value=FLOATS,
    threshold=st.sampled_from([1e-320, 0.5, 0.9]),
)
def test_of_a_policy(policy: tuple[str, str], value: float, threshold: float) -> None:
    name, call = policy
    check(DREAM, {"skip_threshold": threshold}, name, call.format(value))


@pytest.mark.parametrize(
    "changes", [{"num_lookahead": 2**31}, {"strategy": {"cfg_scale": 1e38}}, {"strategy": {"min_block_steps": 2**40}}]
)
def test_what_used_to_end_the_engine_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="less than or equal to 1000"):
        DecodeConfig(strategy=FastDllm(cache="none")).changed(changes)


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-40, 5e-38, 1e-20, 1e-4, 0.000999, -0.0])
def test_a_tiny_temperature_is_none(temperature: float) -> None:
    decode = DecodeConfig.model_validate({**SMALL, "temperature": temperature})
    assert decode == DecodeConfig.model_validate(SMALL) and math.copysign(1, decode.temperature) == 1
    changed = DecodeConfig.model_validate({**SMALL, "temperature": 0.5, "top_p": 0.5})
    assert changed.changed({"temperature": temperature}).top_p == 1


def test_the_least_temperature_gives_the_tokens_and_passes_of_none() -> None:
    plain = DecodeConfig.model_validate(SMALL)
    greedy, least = (loaded(DREAM).decode(plain.changed({"temperature": value}), plain) for value in (0.0, 1e-3))
    assert isinstance(greedy, Completion) and isinstance(least, Completion)
    assert (least.token_ids, least.num_forwards) == (greedy.token_ids, greedy.num_forwards)
