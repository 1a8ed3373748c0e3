"""Prompts as long as the newest models take, cut in slices of whole blocks: on a tiny model, on a CPU."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import Completion, GenerationRequest, Scheduler, decode_requests
from common.platforms import build_engine
from common.runtime import facts_of
from tests.engine.families.passes import FAMILIES
from tests.soaking import SOAKS

CONTEXT = 131_072
NUM_TOKENS = 130_900 if SOAKS else 6_000  # of the prompt: the longest takes minutes


@pytest.mark.slow
def test_a_long_prompt_is_the_same_in_slices_of_any_length(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(FAMILIES / "llada2_2/model_a", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    profile = DeviceProfile(name="one", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=CONTEXT)
    decode = DecodeConfig.model_validate(
        {"max_new_tokens": 64, "num_lookahead": 3, "block_size": 32, "mask_token_id": 511, "eos_token_id": 510,
         "strategy": "levenshtein"}
    )  # fmt: skip
    draws = random.Random(0)
    prompt = tuple(draws.randrange(10, 490) for _ in range(NUM_TOKENS))
    answers = []
    for most in (512, 2048):
        run = RunConfig(model=str(model), decode=decode, max_num_requests=1, max_num_batched_tokens=most)
        scheduler = Scheduler(
            decode, mask_token_id=511, eos_token_id=510, num_slots=1, facts=facts_of(load_model_config(model)),
            max_num_batched_tokens=most,
        )  # fmt: skip
        (answer,) = decode_requests(iter([GenerationRequest("a", prompt)]), scheduler, build_engine(profile, run))
        assert isinstance(answer, Completion) and len(answer.token_ids) == 64
        answers.append(answer.token_ids)
    assert answers[0] == answers[1]
