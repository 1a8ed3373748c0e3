"""A request without numbers beside and before others on a GPU: none of it is read by them, in kernels or graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.config.profile import GraphConfig
from common.decoding import Completion, GenerationRequest
from common.generate import build_generator
from tests.engine.poisoned import BAD, GOOD, poison

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("is_captured", [False, True])
def test_others_have_numbers(tmp_path: Path, is_captured: bool, num_slots: int) -> None:
    profile = DeviceProfile(
        name="test", engine="lopa_cuda", device="cuda", max_model_len=320,
        graph=GraphConfig(mode="cuda_graph" if is_captured else "eager"),
    )  # fmt: skip
    decode = DecodeConfig(num_lookahead=3, block_size=16, max_new_tokens=32)
    run = RunConfig(model=str(poison(tmp_path)), decode=decode, max_num_requests=num_slots)
    texts = [GOOD.format(10), BAD, GOOD.format(11), BAD + GOOD.format(12) * 4, GOOD.format(13), GOOD.format(14) * 4]
    with build_generator(profile, run) as generator:
        prompts = [tuple(generator.tokenizer.encode(text)) for text in texts]
        requests = (GenerationRequest(str(place), prompt) for place, prompt in enumerate(prompts))
        results = {int(result.id): result for result in generator.generate(requests)}
    assert [isinstance(results[place], Completion) for place in range(len(texts))] == [
        "~" not in text for text in texts
    ]
