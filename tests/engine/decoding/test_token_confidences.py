"""A token confidence of one's own runs through the CUDA engine's plain head, and is refused where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import Completion, GenerationRequest, Scheduler, decode_requests
from common.errors import ConfigError
from common.platforms import build_engine
from common.runtime import check_decode

MODEL = Path(__file__).parents[2] / "golden" / "model_a"


def tokens(profile: DeviceProfile, strategy: str) -> tuple[int, ...]:
    decode = DecodeConfig(sampling_strategy=strategy, num_lookahead=3, block_size=8, max_new_tokens=32)
    scheduler = Scheduler(decode, mask_token_id=310, eos_token_id=None)
    engine = build_engine(profile, RunConfig(model=str(MODEL), decode=decode))
    [done] = decode_requests([GenerationRequest("a", (5, 6, 7))], scheduler, engine)
    assert isinstance(done, Completion) and done.num_canvas_tokens == 32
    return done.canvas_token_ids


def test_it_decides_what_is_filled_first(cpu: DeviceProfile) -> None:
    """Logits rank masks in another order than entropies do, so other tokens come out."""
    assert tokens(cpu, "logit_margin") != tokens(cpu, "neg_entropy")


def test_lopa_ascend_refuses_it() -> None:
    profile = DeviceProfile(name="test", engine="lopa_ascend", device="cpu", dtype="float32", max_model_len=512)
    decode = DecodeConfig(sampling_strategy="logit_margin", window_attention="block_causal", max_new_tokens=64)
    with pytest.raises(ConfigError, match="any sampling_strategy but default, margin and neg_entropy are of lopa_cuda"):
        check_decode(decode, profile, load_model_config(str(MODEL)))
