"""SDAR-30B-A3B's layout at a small size, against a plain reference, on both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from completing import completions_of

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import Engine
from common.platforms import build_engine
from tests.engine.families.passes import first_pass
from tests.engine.families.plain_experts import CONFIG, plain_decode, plain_logits, write_model

PROMPTS = ([3, 17, 42, 8, 61, 29], [70, 5, 33, 90, 12, 12, 50, 81])  # with a remainder, and whole blocks
LENGTH, THRESHOLD = 16, 0.2


def engine_of(cpu: DeviceProfile, engine: Any, model: Path, decode: DecodeConfig) -> Engine:
    run = RunConfig(model=str(model), decode=decode, max_num_requests=len(PROMPTS))
    return build_engine(cpu.model_copy(update={"engine": engine, "max_model_len": 128}), run)


def settings(**more: Any) -> DecodeConfig:
    own = {"strategy": "block_diffusion", "block_size": 4, "max_new_tokens": LENGTH, "skip_threshold": THRESHOLD}
    return DecodeConfig.model_validate({**own, "num_lookahead": 0, "eos_token_id": -1, **more})


@pytest.mark.parametrize("engine", ["lopa_cuda", "lopa_ascend"])
def test_a_pass_predicts_what_the_plain_reference_does(cpu: DeviceProfile, tmp_path: Path, engine: str) -> None:
    weights, prompt = write_model(tmp_path), PROMPTS[0]
    trace: dict[str, Any] = {
        "prompt": prompt,
        "decode": {"mask_id": CONFIG["mask_token_id"], "block_size": 4},
        "steps": [{"kind": "denoise", "window": [4, 12]}],
    }
    plan = first_pass(trace, load_model_config(tmp_path))
    plan = plan._replace(sampling=plan.sampling._replace(mask_token_id=CONFIG["mask_token_id"]))
    found = engine_of(cpu, engine, tmp_path, settings()).forward(plan)
    wanted = plain_logits(weights, [*prompt, *[CONFIG["mask_token_id"]] * 6]).softmax(-1).max(-1)
    assert found.token_T.tolist() == wanted.indices.tolist()
    np.testing.assert_allclose(found.probability_T, wanted.values.numpy(), rtol=1e-4)
    assert len(set(found.token_T.tolist())) > 4


@pytest.mark.parametrize("more", [{}, {"strategy": {"name": "block_diffusion", "commit": "separate"}}])
@pytest.mark.parametrize("engine", ["lopa_cuda", "lopa_ascend"])
def test_decoding_gives_the_plain_references_tokens(
    cpu: DeviceProfile, tmp_path: Path, engine: str, more: dict[str, Any]
) -> None:
    weights, decode = write_model(tmp_path), settings(sampling_strategy="default", **more)
    found = completions_of(engine_of(cpu, engine, tmp_path, decode), tmp_path, decode, PROMPTS)
    for number, prompt in enumerate(PROMPTS):
        assert list(found[str(number)].token_ids) == plain_decode(weights, prompt, LENGTH, THRESHOLD)
    num_forced = sum(result.num_forced_fills for result in found.values())
    assert 0 < num_forced < 2 * LENGTH, "some masks are above the threshold"
