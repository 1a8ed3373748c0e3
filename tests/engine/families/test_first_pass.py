"""Every family's model computes what the published code computes: the candidates of a trace's first pass."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile
from common.errors import ConfigError, MissingCapability
from common.runtime import check_decode
from lopa_cuda.assemble import _ops
from tests.engine.families.passes import FAMILIES, TRACES, engine_of, first_pass, first_step, read

# The Ascend engine has the block-causal families.
ON_ASCEND = [("lopa_ascend", name) for name in TRACES if not name.startswith("llada/")]


@pytest.mark.parametrize(("engine", "name"), [*(("lopa_cuda", name) for name in TRACES), *ON_ASCEND])
def test_the_first_pass_has_the_published_candidates(cpu: DeviceProfile, engine: str, name: str) -> None:
    trace = read(name)
    config, profile = load_model_config(trace["folder"]), cpu.model_copy(update={"engine": engine})
    own = {"window_attention": "block_causal"} if engine == "lopa_ascend" else {}
    predictions = engine_of(profile, trace, **own).forward(first_pass(trace, config))
    candidates: dict[str, Any] = first_step(trace)["candidates"]
    assert candidates
    for position, (token, confidence) in candidates.items():
        entry = int(position) - config.shift
        assert predictions.token_T[entry] == token, position
        assert predictions.probability_T[entry] == pytest.approx(confidence, abs=1e-4), position


def test_a_mask_token_that_nobody_names_is_asked_for(cpu: DeviceProfile) -> None:
    config, settings = (
        load_model_config(FAMILIES / "llada2" / "model_a"),
        DecodeConfig(strategy="block_diffusion", max_new_tokens=64),
    )
    with pytest.raises(ConfigError, match=r"^decode\.mask_token_id: missing"):
        check_decode(settings, cpu, config)
    check_decode(settings.model_copy(update={"mask_token_id": 511}), cpu, config)


@pytest.mark.parametrize(("block_size", "warnings"), [(4, 0), (16, 1)])
def test_another_block_size_than_the_models_is_told_of(
    cpu: DeviceProfile, caplog: pytest.LogCaptureFixture, block_size: int, warnings: int
) -> None:
    config = load_model_config(FAMILIES / "sdar" / "model_a")
    check_decode(DecodeConfig(strategy="block_diffusion", block_size=block_size, max_new_tokens=64), cpu, config)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["decode.block_size is 16, the model was trained with blocks of 4: set it to 4"] * warnings


@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
def test_what_kernels_for_experts_in_8_bits_do_not_take_is_said(scheme: Any) -> None:
    profile = DeviceProfile(name="test", engine="lopa_cuda", device="cuda", max_model_len=64, quantization=scheme)
    config = load_model_config(FAMILIES / "llada2" / "model_a")
    assert config.moe is not None
    config = replace(config, moe=replace(config.moe, intermediate_size=48))
    cache: Any = SimpleNamespace(committed=torch.zeros(1, dtype=torch.bfloat16))
    nowhere: Any = None
    with pytest.raises(MissingCapability, match="take multiples of 32: remove quantization"):
        _ops(profile, config, cache, nowhere)


def test_a_mixture_of_experts_has_no_invariant_sums() -> None:
    profile = DeviceProfile(name="test", engine="lopa_cuda", device="cuda", max_model_len=64, batch_invariant=True)
    config = load_model_config(FAMILIES / "llada2" / "model_a")
    cache: Any = SimpleNamespace(committed=torch.zeros(1, dtype=torch.bfloat16))
    nowhere: Any = None
    with pytest.raises(MissingCapability, match="batch_invariant of a mixture of experts is not implemented: remove"):
        _ops(profile, config, cache, nowhere)
