"""Every block-causal family on the Ascend engine's ref lane: the CUDA engine's tokens, in float32 and in bfloat16."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from completing import completions_of

from common.checkpoint import load_model_config, load_tokenizer
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import Engine, GenerationRequest, Rejection, Room, Scheduler, decode_requests
from common.errors import ConfigError, MissingCapability
from common.platforms import build_engine
from common.runtime import facts_of, synthetic_plan
from lopa_ascend.assemble import assemble
from lopa_ascend.kv import most_pages
from lopa_ascend.limits import check_model
from lopa_ascend.load import HEAD_SIZE, head_places
from lopa_ascend.ops import VirtualRows
from lopa_ascend.shapes import Shapes
from lopa_ascend.warmup import usual_shapes
from tests.conftest import GOLDEN
from tests.engine.families.test_dummy_weights import CONFIGS
from tests.engine.lopa_ascend.watching import Agreement, WatchingEngine

FAMILIES = GOLDEN.parent / "golden_families"
DEMO = GOLDEN.parents[1] / "models" / "demo_block"


def profile(engine: str, dtype: str = "float32") -> DeviceProfile:
    settings = {"name": "test", "engine": engine, "device": "cpu", "dtype": dtype, "max_model_len": 512}
    return DeviceProfile.model_validate(settings)


def prompts(model: Path, lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return prompts of these lengths, without special tokens."""
    most = load_model_config(model).vocab_size - 20
    return [tuple((13 * n * n + 7 * m + n) % most + 2 for m in range(length)) for n, length in enumerate(lengths)]


LENGTHS = (7, 32, 125, 131)  # within a block, whole blocks, up to a page's border, beyond it


def decode_all(engine: Any, model: Path, decode: DecodeConfig, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """Passes and tokens by request."""
    found = completions_of(engine, model, decode, prompts(model, lengths))
    return {id: (done.num_forwards, *done.canvas_token_ids) for id, done in found.items()}


def run_of(model: Path, decode: DecodeConfig, num_requests: int = len(LENGTHS)) -> RunConfig:
    return RunConfig(model=str(model), decode=decode, max_num_requests=num_requests)


SEPARATE = {"name": "block_diffusion", "commit": "separate"}
UNCACHED = {"name": "block_diffusion", "cache": "none"}
EDITED = {"name": "block_diffusion", "edit_threshold": 0.5}
SUB_BLOCKS = {"name": "fast_dllm_v2", "sub_block_size": 8}
BLOCKS: dict[str, Any] = {"strategy": "block_diffusion", "max_new_tokens": 24, "stop_at_eos": False}
REVISED: dict[str, Any] = {  # blocks of random weights never rest
    "max_new_tokens": 24, "block_size": 16, "mask_token_id": 511, "skip_threshold": 0.5, "max_steps": 200,
}  # fmt: skip
FAST: dict[str, Any] = {"strategy": "fast_dllm_v2", "max_new_tokens": 40, "mask_token_id": 511, "stop_at_eos": False}
D2F: dict[str, Any] = {"strategy": "d2f", "window_attention": "block_causal", "block_size": 8, "max_new_tokens": 32}
# Model, settings: QK norm, partial rotation and mixtures of experts; the prompt's remainder in the first block.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sdar": ("sdar/model_a", {**BLOCKS, "block_size": 4}),
    "sdar, separate commits": ("sdar/model_a", {**BLOCKS, "block_size": 4, "strategy": SEPARATE}),
    "sdar, blocks of 8 ahead": ("sdar/model_b", {**BLOCKS, "block_size": 8, "block_add_threshold": 0.5}),
    "sdar, nothing cached": ("sdar/model_b", {**BLOCKS, "block_size": 8, "strategy": UNCACHED, "max_new_tokens": 12}),
    "fast_dllm_v2": ("fastdllm_v2/model_a", {**FAST, "block_size": 32, "strategy": SUB_BLOCKS, "skip_threshold": 0.5}),
    "llada2": ("llada2/model_a", {**BLOCKS, "block_size": 8, "mask_token_id": 511}),
    "llada2, edited": ("llada2/model_b", {**BLOCKS, "block_size": 16, "strategy": EDITED, "mask_token_id": 511}),
    "llada2_2": ("llada2_2/model_b", {**BLOCKS, "block_size": 16, "mask_token_id": 511}),
    "llada2_2, revised": ("llada2_2/model_b", {**REVISED, "strategy": {"name": "levenshtein", "edit_threshold": 0.3}}),
    "llada2_2, as sglang": ("llada2_2/model_b", {**REVISED, "strategy": {"name": "levenshtein", "variant": "sglang"}}),
    "d2f of llada": ("llada/model_a", D2F),
}
REVISING = ("llada2_2, revised", "llada2_2, as sglang")
# Their blocks become final in passes of one row, or never.
ONE_ROW_COMMITS = (
    "sdar, separate commits", "sdar, nothing cached", "fast_dllm_v2", "llada2, edited", *REVISING,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("num_lookahead", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", REVISING)
def test_revised_tokens_are_those_of_the_cuda_engine(case: str, num_lookahead: int) -> None:
    test_tokens_are_those_of_the_cuda_engine(case, num_lookahead)


@pytest.mark.slow
@pytest.mark.parametrize("num_lookahead", [0, 3])
@pytest.mark.parametrize("case", [case for case in CASES if case not in REVISING])
def test_tokens_are_those_of_the_cuda_engine(case: str, num_lookahead: int) -> None:
    """All branches also hold the same KV of a finished block."""
    name, settings = CASES[case]
    model, decode = FAMILIES / name, DecodeConfig.model_validate({**settings, "num_lookahead": num_lookahead})
    run = run_of(model, decode)
    watching = WatchingEngine(assemble(profile("lopa_ascend"), run))
    found = decode_all(watching, model, decode)
    assert found == decode_all(build_engine(profile("lopa_cuda"), run), model, decode)
    assert watching.num_compared > 0 or num_lookahead == 0 or case in ONE_ROW_COMMITS


@pytest.mark.parametrize("name", ["sdar_moe", "stable_diffcoder", "stable_diffcoder tied"])
def test_made_up_weights_of_the_other_families_give_the_cuda_engines_predictions(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    decode = DecodeConfig.model_validate({**BLOCKS, "block_size": 8, "num_lookahead": 1, "mask_token_id": 95})
    run = run_of(tmp_path, decode).model_copy(update={"load_format": "dummy"})
    plan = synthetic_plan(load_model_config(tmp_path), num_rows=2, width=9, num_cached=0, read_share=1.0)
    plan = plan._replace(commits_locally=True)
    found, wanted = (
        build_engine(profile(engine).model_copy(update={"max_model_len": 64}), run).forward(plan)
        for engine in ("lopa_ascend", "lopa_cuda")
    )
    np.testing.assert_allclose(found.values_3T, wanted.values_3T, rtol=1e-4)
    assert len(set(found.token_T.tolist())) > 3


def answers(engine: Engine, decode: DecodeConfig, num_math: int, num_code: int) -> list[tuple[int, ...]]:
    """Return the block-diffusion demo model's answers to held-out problems."""
    tokenizer = load_tokenizer(str(DEMO))
    lines = [
        line
        for kind, count in (("math", num_math), ("code", num_code))
        for line in (DEMO.parent / "demo" / f"heldout_{kind}.jsonl").read_text().splitlines()[:count]
    ]
    prompts = [tokenizer.encode(json.loads(line)["question"] + "\n") for line in lines]
    return [done.canvas_token_ids for done in completions_of(engine, DEMO, decode, prompts).values()]


@pytest.mark.slow
@pytest.mark.parametrize(("num_lookahead", "num_math", "num_code"), [(1, 2, 1), (3, 4, 1)])
def test_bfloat16_gives_the_cuda_engines_tokens_at_99_percent_of_the_positions(
    num_lookahead: int, num_math: int, num_code: int
) -> None:
    """The shipped block-diffusion model, decoded freely; its heads of 64 are padded and normed."""
    settings = {"strategy": "block_diffusion", "block_size": 16, "max_new_tokens": 192, "num_lookahead": num_lookahead}
    decode = DecodeConfig.model_validate(settings)
    run = run_of(DEMO, decode)
    found, wanted = (
        answers(build_engine(profile(engine, "bfloat16"), run), decode, num_math, num_code)
        for engine in ("lopa_ascend", "lopa_cuda")
    )
    pairs = [pair for have, want in zip(found, wanted, strict=True) for pair in zip_longest(have, want)]
    num_equal = sum(have == want for have, want in pairs)
    print(f"{num_equal} of {len(pairs)} tokens are equal")
    assert len(pairs) > 100 and num_equal >= 0.99 * len(pairs)


def test_bfloat16_experts_predict_what_the_cuda_engines_do(tmp_path: Path) -> None:
    """Experts come in groups of four, since the operator takes no smaller ones. The heads of 32 are padded by a square,
    so their norms round alike; those of 16 do not, and 98.1% of the clear predictions of model_b are equal."""
    source = FAMILIES / "llada2" / "model_a"
    tree = {**json.loads((source / "config.json").read_text()), "n_group": 2, "topk_group": 1}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    settings = {**BLOCKS, "block_size": 16, "mask_token_id": 511, "num_lookahead": 3, "sampling_strategy": "margin"}
    model, decode = tmp_path, DecodeConfig.model_validate(settings)
    run = run_of(model, decode)
    both = Agreement(*(build_engine(profile(name, "bfloat16"), run) for name in ("lopa_cuda", "lopa_ascend")))
    decode_all(both, model, decode)
    print(f"{both.num_equal} of {both.num_read} clear predictions are equal")
    assert both.num_read > 500 and both.num_equal >= 0.99 * both.num_read


def test_in_8_bits_nearly_all_clear_predictions_stay(caplog: pytest.LogCaptureFixture) -> None:
    name, settings = CASES["llada2"]
    settings = {**settings, "num_lookahead": 1, "sampling_strategy": "margin"}
    model, decode = FAMILIES / name, DecodeConfig.model_validate(settings)
    quantized = profile("lopa_ascend").model_copy(update={"quantization": "w8a8"})
    with caplog.at_level("INFO"):
        engine = assemble(quantized, run_of(model, decode))
    assert "the experts of 2 layers in 8-bit integers" in caplog.text
    both = Agreement(assemble(profile("lopa_ascend"), run_of(model, decode)), engine, margin=0.2)
    decode_all(both, model, decode)
    assert both.num_read > 200 and 0.9 * both.num_read <= both.num_equal < both.num_read


def test_in_8_bits_both_engines_decode_the_same_tokens() -> None:
    name, settings = CASES["llada2"]
    model = FAMILIES / name
    decode = DecodeConfig.model_validate(settings)
    quantized = [profile(engine).model_copy(update={"quantization": "w8a8"}) for engine in ("lopa_cuda", "lopa_ascend")]
    cuda, ascend = (decode_all(build_engine(own, run_of(model, decode)), model, decode) for own in quantized)
    assert cuda == ascend != decode_all(build_engine(profile("lopa_cuda"), run_of(model, decode)), model, decode)


@pytest.mark.parametrize(("head_size", "rotary_size"), [(128, 64), (64, 64), (32, 16), (16, 16)])
def test_rotated_pairs_lie_half_a_head_apart(head_size: int, rotary_size: int) -> None:
    place_H = head_places(head_size, rotary_size)
    num_pairs = rotary_size // 2
    assert place_H[:num_pairs].tolist() == list(range(num_pairs))
    assert (place_H[num_pairs:rotary_size] - place_H[:num_pairs] == HEAD_SIZE // 2).all()
    assert len(set(place_H.tolist())) == head_size and int(place_H.max()) < HEAD_SIZE


def test_prompts_of_more_blocks_than_one_call_takes_are_attended_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    name, settings = CASES["sdar"]
    model, decode = FAMILIES / name, DecodeConfig.model_validate({**settings, "num_lookahead": 1})
    wanted = decode_all(assemble(profile("lopa_ascend"), run_of(model, decode)), model, decode)
    calls = []
    right = VirtualRows.parts
    monkeypatch.setattr("lopa_ascend.ops.facade.MOST_ROWS", 5)
    monkeypatch.setattr("lopa_ascend.ops.rows.MOST_ROWS", 5)
    monkeypatch.setattr(VirtualRows, "parts", lambda rows: calls.append(len(rows.query_ends)) or right(rows))
    assert decode_all(assemble(profile("lopa_ascend"), run_of(model, decode)), model, decode) == wanted
    assert max(calls) > 5 * 5


@pytest.mark.parametrize(
    ("num_tokens", "settings", "needed"),
    [
        (130, {"block_size": 32, "max_new_tokens": 32}, 1 + 2 * 1),  # 128 of them are final first; 162 round up to 192
        (130, {"block_size": 48, "max_new_tokens": 32}, 0 + 2 * 2),  # 96 are, so both pages may differ
        (255, {"block_size": 32, "max_new_tokens": 1}, 1 + 2 * 1),
        (255, {"block_size": 32, "max_new_tokens": 2}, 1 + 2 * 2),  # a block begins after the second page
        (130, {"block_size": 32, "max_new_tokens": 32, "strategy": UNCACHED}, 0 + 2 * 2),
    ],
)
def test_pages_hold_whole_blocks_from_position_0(num_tokens: int, settings: dict[str, Any], needed: int) -> None:
    decode = DecodeConfig.model_validate({"strategy": "block_diffusion", "num_lookahead": 1, **settings})
    assert most_pages(Room(num_tokens, decode), 1) == needed


def test_requests_of_whole_blocks_never_run_out_of_the_pages_they_were_admitted_with() -> None:
    name, settings = CASES["sdar, blocks of 8 ahead"]
    model, decode = FAMILIES / name, DecodeConfig.model_validate({**settings, "num_lookahead": 3})
    wanted = decode_all(assemble(profile("lopa_ascend"), run_of(model, decode)), model, decode)
    most = max(most_pages(Room(length, decode), 1) for length in LENGTHS)
    engine = assemble(profile("lopa_ascend"), run_of(model, decode), num_pages=most + 1)
    assert decode_all(engine, model, decode) == wanted
    assert engine.describe()["kv_pages"]["most_in_use"] <= most + 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dual": ({**FAST, "strategy": {"name": "fast_dllm_v2", "cache": "dual"}}, "set cache to prefix"),
    "counted": ({**BLOCKS, "mask_probability": "counted"}, "mask_probability: .* remove it"),
    "penalty": ({**BLOCKS, "strategy": {**EDITED, "penalty_lambda": 1.0}}, "penalty_lambda: .* remove it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_decode_is_said_before_anything_is_loaded(case: str) -> None:
    settings, fix = REFUSED[case]
    with pytest.raises(ConfigError, match=fix):
        assemble(profile("lopa_ascend"), run_of(Path("nowhere"), DecodeConfig.model_validate(settings)))


def test_a_request_that_wants_another_cache_than_the_run_is_rejected() -> None:
    name, settings = CASES["fast_dllm_v2"]
    model, decode = FAMILIES / name, DecodeConfig.model_validate(settings)
    own = decode.changed({"strategy": {"cache": "dual"}})
    engine = assemble(profile("lopa_ascend"), run_of(model, decode))
    scheduler = Scheduler(decode, mask_token_id=511, eos_token_id=None, facts=facts_of(load_model_config(model)))
    (rejection,) = decode_requests(iter([GenerationRequest("0", (5, 6), decode=own)]), scheduler, engine)
    assert isinstance(rejection, Rejection) and "set cache to prefix" in rejection.reason


def test_the_fused_kv_write_has_no_norm_of_heads() -> None:
    fused = profile("lopa_ascend").model_copy(update={"kernels": "triton"})
    with pytest.raises(MissingCapability, match=r"norm of heads .* set kernels to auto"):
        check_model(fused, load_model_config(FAMILIES / "sdar" / "model_a"))


def test_shapes_captured_ahead_are_those_of_windows_of_whole_blocks() -> None:
    shapes = Shapes.of((), (), 48)
    decode = DecodeConfig.model_validate({**BLOCKS, "block_size": 32, "max_new_tokens": 8, "num_lookahead": 3})
    assert set(usual_shapes(shapes, decode, 1)) == {
        shapes.shape(rows * blocks * 32, rows * blocks) for rows in (1, 4) for blocks in (1, 2)
    }
    separate = decode.changed({"strategy": {"commit": "separate"}})
    assert set(usual_shapes(shapes, separate, 1)) == {shapes.shape(32, 1), shapes.shape(128, 4)}
