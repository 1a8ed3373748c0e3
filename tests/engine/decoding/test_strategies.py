"""k = 0 is the plain decoder under every strategy; LoPA over each ends and only fills masks."""

from __future__ import annotations

import json

import pytest
import torch
from completing import completions_of

from common.checkpoint import load_model_config, load_weights
from common.config import DecodeConfig, DeviceProfile, MultiBlock, RunConfig
from common.decoding import Completion
from common.platforms import build_engine
from tests.conftest import GOLDEN
from tests.reference import PlainModel, plain_d2f, plain_fast_dllm, plain_multi_block, plain_vanilla

MODEL = GOLDEN / "model_a"
PROMPT = json.loads((GOLDEN / "01_d2f_full_k0.json").read_text())["prompt"]


def decode_with_engine(profile: DeviceProfile, decode: DecodeConfig, *prompts: list[int]) -> list[Completion]:
    engine = build_engine(profile, RunConfig(model=str(MODEL), decode=decode, max_num_requests=len(prompts)))
    return [*completions_of(engine, MODEL, decode, prompts).values()]


def plain_model() -> PlainModel:
    config = load_model_config(MODEL)
    return PlainModel(config, load_weights(MODEL, config, tp_rank=0, tp_size=1, dtype=torch.float32))


@pytest.mark.parametrize("attention", ["full", "block_causal"])
@pytest.mark.parametrize("sampling", ["default", "margin", "neg_entropy"])
@pytest.mark.parametrize("shift_row", ["stale", "fresh"])
def test_d2f_without_lookahead_is_plain_d2f(cpu: DeviceProfile, attention: str, sampling: str, shift_row: str) -> None:
    decode = DecodeConfig(
        num_lookahead=0, block_size=16, max_new_tokens=64, skip_threshold=0.6, sampling_strategy=sampling,
        window_attention=attention, shift_row=shift_row, stop_at_eos=False,
    )  # fmt: skip
    (completion,) = decode_with_engine(cpu, decode, PROMPT)
    model = plain_model()
    canvas, steps = plain_d2f(model, PROMPT, decode, model.config.eos_token_id)
    assert list(completion.canvas_token_ids) == canvas
    assert completion.num_forwards == steps


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_fast_dllm_without_lookahead_is_plain_fast_dllm(cpu: DeviceProfile, cache: str) -> None:
    decode = DecodeConfig(
        strategy={"name": "fast_dllm", "cache": cache}, num_lookahead=0, block_size=16, max_new_tokens=48,
        skip_threshold=0.5, stop_at_eos=False,
    )  # fmt: skip
    (completion,) = decode_with_engine(cpu, decode, PROMPT)
    wanted = plain_fast_dllm(plain_model(), PROMPT, decode)
    assert (list(completion.canvas_token_ids), completion.num_forwards) == wanted


@pytest.mark.parametrize(
    ("delay", "threshold", "activation"),
    [(0, 1.0, 0.95), (1, 1.5, 0.95), (2, 0.7, 0.95), (3, 1.0, 0.5), (2, 0.5, 0.25), (1000, 1.0, 0.95)],
)
def test_multi_block_without_lookahead_is_plain_multi_block(
    cpu: DeviceProfile, delay: int, threshold: float, activation: float
) -> None:
    decode = DecodeConfig(
        strategy=MultiBlock(cache_delay=delay), fill_rule=f"entropy(below={threshold})", num_lookahead=0, block_size=8,
         max_new_tokens=48, decoded_token_threshold=activation, stop_at_eos=False, eos_token_id=-1,
    )  # fmt: skip
    (completion,) = decode_with_engine(cpu, decode, PROMPT)
    wanted = plain_multi_block(plain_model(), PROMPT, decode, delay, threshold)
    assert (list(completion.canvas_token_ids), completion.num_forwards) == wanted
    assert 0 < completion.num_forced_fills < 48, "entropies lie on both sides of the threshold"


@pytest.mark.parametrize("threshold", [1.0, 0.5])
def test_vanilla_without_lookahead_is_plain_vanilla(cpu: DeviceProfile, threshold: float) -> None:
    decode = DecodeConfig(
        strategy="vanilla", num_lookahead=0, max_new_tokens=24, skip_threshold=threshold, stop_at_eos=False
    )
    (completion,) = decode_with_engine(cpu, decode, PROMPT)
    assert (list(completion.canvas_token_ids), completion.num_forwards) == plain_vanilla(plain_model(), PROMPT, decode)
    if threshold == 1.0:
        assert completion.num_forwards == 24


MULTI_BLOCK = {"strategy": {"name": "multi_block", "cache_delay": 2}, "fill_rule": "entropy(below=0.2)"}


@pytest.mark.parametrize("strategy", ["vanilla", "fast_dllm", "d2f", "multi_block"])
@pytest.mark.parametrize("shift_row", ["stale", "fresh"])
def test_lookahead_needs_fewer_forwards_over_every_strategy(cpu: DeviceProfile, strategy: str, shift_row: str) -> None:
    steps = []
    for k in (0, 3):
        own = MULTI_BLOCK if strategy == "multi_block" else {"strategy": strategy}
        decode = DecodeConfig.model_validate({
            **own, "shift_row": shift_row, "num_lookahead": k, "block_size": 16, "max_new_tokens": 48,
            "stop_at_eos": False, "skip_threshold": 0.95,
        })  # fmt: skip
        (completion,) = decode_with_engine(cpu, decode, PROMPT)
        assert load_model_config(MODEL).mask_token_id not in completion.canvas_token_ids
        assert sum(completion.tokens_per_step) == completion.num_canvas_tokens == len(completion.canvas_token_ids)
        steps.append(completion.num_forwards)
    assert steps[1] < steps[0]


@pytest.mark.parametrize("attention", ["full", "block_causal"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("shift_row", ["stale", "fresh"])
def test_a_request_alone_or_among_eight_others_gets_the_same_tokens(
    cpu: DeviceProfile, attention: str, temperature: float, shift_row: str
) -> None:
    decode = DecodeConfig(
        num_lookahead=3, block_size=16, max_new_tokens=48, window_attention=attention, temperature=temperature,
        shift_row=shift_row,
    )  # fmt: skip
    others = [[(7 * n + m) % 290 + 2 for m in range(5 + 4 * n)] for n in range(1, 9)]
    (alone,) = decode_with_engine(cpu, decode, PROMPT)
    together = decode_with_engine(cpu, decode, PROMPT, *others)
    assert together[0].canvas_token_ids == alone.canvas_token_ids
    assert together[0].num_forwards == alone.num_forwards


def test_temperature_draws_other_tokens_and_the_same_ones_again(cpu: DeviceProfile) -> None:
    decode = DecodeConfig(num_lookahead=2, block_size=16, max_new_tokens=48, temperature=1.0, stop_at_eos=False)
    first, again = (decode_with_engine(cpu, decode, PROMPT)[0] for _ in range(2))
    greedy = decode_with_engine(cpu, decode.model_copy(update={"temperature": 0.0}), PROMPT)[0]
    assert first.canvas_token_ids == again.canvas_token_ids != greedy.canvas_token_ids


def test_top_k_of_one_is_greedy(cpu: DeviceProfile) -> None:
    decode = DecodeConfig(num_lookahead=2, block_size=16, max_new_tokens=48, stop_at_eos=False)
    sampled = decode.model_copy(update={"temperature": 1.0, "top_k": 1})
    greedy_ids = decode_with_engine(cpu, decode.model_copy(update={"skip_threshold": 1.0}), PROMPT)[0].canvas_token_ids
    sampled_ids = decode_with_engine(cpu, sampled, PROMPT)[0].canvas_token_ids
    assert len(sampled_ids) == len(greedy_ids)  # with one candidate left every probability is 1: all masks fill at once
