"""Made-up weights of every family run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.platforms import build_engine
from common.runtime import synthetic_plan
from tests.engine.families.passes import FAMILIES

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 64, "mask_token_id": 95, "eos_token_id": 94,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: json.loads((FAMILIES / name / "model_b" / "config.json").read_text())
       for name in ("llada", "sdar", "llada2", "fastdllm_v2")},
    "sdar_moe": {**SIZES, "model_type": "sdar_moe", "num_experts": 8, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 12, "norm_topk_prob": True},
    "stable_diffcoder": {**SIZES, "architectures": ["StableDiffcoderForCausalLM"], "intermediate_size": 48},
    "stable_diffcoder tied": {**SIZES, "architectures": ["StableDiffcoderForCausalLM"], "intermediate_size": 48,
                              "tie_word_embeddings": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_made_up_weights_run(cpu: DeviceProfile, tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    decode = DecodeConfig(mask_token_id=95, num_lookahead=0, max_new_tokens=32)
    run = RunConfig(model=str(tmp_path), load_format="dummy", decode=decode, max_num_requests=1)
    engine = build_engine(cpu, run)
    plan = synthetic_plan(load_model_config(tmp_path), num_rows=2, width=9, num_cached=0, read_share=1.0)
    predictions = engine.forward(plan)
    assert np.isfinite(predictions.values_3T).all()
    assert len(set(predictions.token_T.tolist())) > 3  # of 18 entries, which differ
