"""The engine on a GPU: captured steps decode what eager ones do, fused kernels what plain operators do, 8 bits run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.batch import run_batch
from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, InputConfig, OutputConfig, RunConfig
from common.config.profile import GraphConfig
from common.constraints import NEVER, Automaton
from common.decoding import (
    CommitSpan,
    Completion,
    GenerationRequest,
    PredictionOrder,
    Predictions,
    Room,
    Scheduler,
    StepPlan,
    StepRecord,
)
from common.errors import EngineError
from common.generate import Generator, build_generator, decode_requests
from common.runtime import synthetic_plan
from common.scoring.own_results import score_math
from lopa_cuda.assemble import assemble
from lopa_cuda.engine import CudaEngine
from tests.telling import probability_and_pass

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).parents[2]
GRAPHS = GraphConfig(mode="cuda_graph")
MASK, EOS = 2000, 2001
CONFIG = {
    "model_type": "Dream", "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 2048, "mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS,
    "tie_word_embeddings": False,
}  # fmt: skip
PROMPTS = [tuple((7 * n + 13 * m) % 1900 for m in range(20 + 90 * n)) for n in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def build(
    model: Path, *, is_captured: bool, num_slots: int = 1, num_pages: int | None = None, **settings: Any
) -> CudaEngine:
    profile = DeviceProfile(
        name="test", engine="lopa_cuda", device="cuda", max_model_len=1024,
        graph=GraphConfig(mode="cuda_graph" if is_captured else "eager"), **settings,
    )  # fmt: skip
    decode = DecodeConfig(num_lookahead=3, block_size=16, max_new_tokens=64)
    run = RunConfig(model=str(model), load_format="dummy", max_num_requests=num_slots, decode=decode)
    return assemble(profile, run, num_pages=num_pages)


def decode(
    engine: CudaEngine, own: Sequence[dict[str, Any]] = ({},), automaton: Automaton | None = None, **settings: Any
) -> dict[str, tuple[int, ...]]:
    """own: what each prompt has of its own, the first again after the last. automaton: of every other request."""
    config = DecodeConfig(block_size=16, max_new_tokens=64, stop_at_eos=False, **settings)
    slots = engine.capacity.num_slots
    scheduler = Scheduler(config, mask_token_id=MASK, eos_token_id=EOS, num_slots=slots)
    requests = [
        GenerationRequest(
            str(number), prompt, config.model_copy(update=own[number % len(own)]),
            automaton=None if number % 2 else automaton,
        )
        for number, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    ended = [result for result in decode_requests(iter(requests), scheduler, engine) if isinstance(result, Completion)]
    return {result.id: result.canvas_token_ids for result in ended}


@pytest.mark.parametrize(
    "settings",
    [
        {"num_lookahead": 3},
        {"num_lookahead": 7, "shift_row": "fresh", "window_attention": "block_causal"},
        {"num_lookahead": 1, "temperature": 0.8, "top_p": 0.9},
        {"num_lookahead": 2, "own": [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 9}]},
        {"num_lookahead": 2, "strategy": {"name": "fast_dllm", "cache": "dual"}},
    ],
    ids=str,
)
def test_replay_decodes_the_tokens_of_eager_execution(model: Path, settings: dict[str, Any]) -> None:
    # Eager runs at exact shapes too, where a library may sum in another order: the same padded shapes are run eagerly.
    captured = build(model, is_captured=True, num_slots=3, kernels="triton")
    tokens = decode(captured, **settings)
    for runner in (captured.layers, captured.head):
        for key, entry in runner._entries.items():
            entry.run = lambda runner=runner, key=key, entry=entry: runner._forward(key, entry.buffers)
    assert decode(captured, **settings) == tokens
    assert len(tokens) == len(PROMPTS)


@pytest.mark.parametrize("settings", [{"num_lookahead": 0}, {"num_lookahead": 3, "temperature": 0.8}], ids=str)
def test_formats_read_the_logits_of_a_replayed_head(model: Path, settings: dict[str, Any]) -> None:
    """Tokens of even and of odd ids in turn, beside a request without a format."""
    next_QC = np.array([[1, NEVER], [NEVER, 0]], np.int32)
    in_turn = Automaton(np.arange(2048, dtype=np.int32) % 2, next_QC, np.array([True, True]), 0, "in turn")
    captured = build(model, is_captured=True, num_slots=3, kernels="triton")
    decode(captured, **settings)
    num_captured = captured.head.num_captured
    tokens = decode(captured, automaton=in_turn, **settings)
    assert captured.head.num_captured == num_captured, "nothing is captured for formats"
    for number in ("0", "2"):
        text = [token for token in tokens[number] if token != EOS]
        assert text == list(tokens[number][: len(text)]) and [token % 2 for token in text] == ([0, 1] * 32)[: len(text)]
    for runner in (captured.layers, captured.head):
        for key, entry in runner._entries.items():
            entry.run = lambda runner=runner, key=key, entry=entry: runner._forward(key, entry.buffers)
    assert decode(captured, automaton=in_turn, **settings) == tokens


@pytest.mark.parametrize("settings", [{"num_lookahead": 3}, {"num_lookahead": 7, "temperature": 0.8}], ids=str)
def test_log_probabilities_after_a_replay_are_the_logs_of_its_probabilities(
    model: Path, settings: dict[str, Any]
) -> None:
    """An eager piece after the graphs computes them, which leaves tokens as they are and replays as fast."""
    engine = build(model, is_captured=True, num_slots=3, kernels="triton")
    tokens = decode(engine, **settings)
    config = DecodeConfig(block_size=16, max_new_tokens=64, stop_at_eos=False, **settings)
    found: dict[str, list[StepRecord]] = {str(number): [] for number in range(len(PROMPTS))}
    scheduler = Scheduler(
        config, mask_token_id=MASK, eos_token_id=EOS, num_slots=3,
        observer=lambda record: found[record.request_id].append(record),
    )  # fmt: skip
    requests = [GenerationRequest(str(n), prompt, num_logprobs=5) for n, prompt in enumerate(PROMPTS)]
    num_captured = engine.head.num_captured
    for done in decode_requests(iter(requests), scheduler, engine):
        assert isinstance(done, Completion) and done.canvas_token_ids == tokens[done.id]
        recorded = probability_and_pass(done, found[done.id])
        logprobs = [one.logprob for one in done.logprobs]
        wanted = [
            np.log(recorded[place][0]) if place in recorded else logprobs[place] for place in range(len(logprobs))
        ]
        np.testing.assert_allclose(logprobs, wanted, atol=0.05)  # bf16 logits
        assert all(one.top[0][1] >= one.logprob - 1e-6 and len(one.top) == 5 for one in done.logprobs)
    assert engine.head.num_captured == num_captured, "nothing is captured for those that ask"


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("num_cached", [0, 200])
def test_fused_kernels_predict_what_plain_operators_do(model: Path, num_rows: int, num_cached: int) -> None:
    plain = predict(model, build(model, is_captured=False, kernels="torch"), num_rows, num_cached)
    fused = predict(model, build(model, is_captured=True, kernels="triton"), num_rows, num_cached)
    np.testing.assert_allclose(fused.confidence_T, plain.confidence_T, atol=0.05)
    assert (fused.token_T == plain.token_T).mean() > 0.7


@pytest.mark.parametrize("num_slots", [1, 3])
def test_nothing_is_captured_behind_the_start(model: Path, num_slots: int) -> None:
    engine = build(model, is_captured=True, num_slots=num_slots)
    before = engine.memory()["graphs"]
    assert before > 20
    decode(engine, num_lookahead=3)
    if num_slots > 1:  # whatever requests ask for
        decode(engine, num_lookahead=2, temperature=0.7)
        decode(engine, num_lookahead=2, temperature=0.7, top_k=20)
    assert engine.memory()["graphs"] == before


def test_requests_together_decode_what_they_do_alone_up_to_rounding(model: Path) -> None:
    together = decode(build(model, is_captured=True, num_slots=3), num_lookahead=2)
    alone = decode(build(model, is_captured=True), num_lookahead=2)
    agreeing = [np.mean(np.array(together[name]) == np.array(alone[name])) for name in alone]
    assert np.mean(agreeing) > 0.5, "batch shapes may move a rounding, never whole answers"


def test_requests_together_decode_what_they_do_alone_with_invariant_sums(model: Path) -> None:
    drawn: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 9}]
    together, alone = (
        decode(build(model, is_captured=True, num_slots=slots, batch_invariant=True), drawn, num_lookahead=2)
        for slots in (3, 1)
    )
    assert together == alone


@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_short_pool_decodes_the_tokens_of_a_whole_one(model: Path, num_slots: int) -> None:
    """One slot has the same steps; with three, requests that wait for pages share other passes."""
    whole = decode(build(model, is_captured=True, num_slots=num_slots), num_lookahead=2)
    engine = build(model, is_captured=True, num_slots=num_slots, num_pages=5)
    short = decode(engine, num_lookahead=2)
    agreeing = [np.mean(np.array(short[name]) == np.array(whole[name])) for name in whole]
    assert agreeing == [1.0] * len(PROMPTS) if num_slots == 1 else np.mean(agreeing) > 0.5
    assert (
        engine.describe()["kv_pages"]["most_in_use"]
        <= 5
        < engine.capacity.num_reserved([Room(len(prompt), DecodeConfig(max_new_tokens=64)) for prompt in PROMPTS])
    )


@pytest.mark.parametrize("quantization", ["w8a8", "fp8"])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("quantize_lm_head", [False, True])
def test_eight_bit_models_run(model: Path, quantization: str, kernels: str, quantize_lm_head: bool) -> None:
    is_fused, eight_bits = kernels == "triton", {"quantization": quantization, "quantize_lm_head": quantize_lm_head}
    quantized = build(model, is_captured=is_fused, kernels=kernels, **eight_bits)
    plain = build(model, is_captured=False, kernels="torch", **eight_bits)
    found, wanted = (predict(model, engine, 2, 100) for engine in (quantized, plain))
    np.testing.assert_allclose(found.confidence_T, wanted.confidence_T, atol=0.15)


@pytest.fixture
def demo_generator() -> Iterator[Generator]:
    profile = DeviceProfile(name="test", engine="lopa_cuda", device="cuda", max_model_len=512, graph=GRAPHS)
    decode = DecodeConfig(num_lookahead=7, block_size=16, max_new_tokens=192)
    with build_generator(profile, RunConfig(model=str(ROOT / "models/demo"), decode=decode)) as generator:
        yield generator


def test_the_demo_model_solves_its_problems(demo_generator: Generator) -> None:
    lines = (ROOT / "models/demo/heldout_math.jsonl").read_text(encoding="utf-8").splitlines()[:20]
    problems = [json.loads(line) for line in lines]
    answers = demo_generator.complete(*(problem["question"] + "\n" for problem in problems))
    right = [score_math(text, problem["final"]) for text, problem in zip(answers, problems, strict=True)]
    assert sum(right) >= 16


def test_out_of_memory_ends_the_run_with_rank_and_step_and_keeps_what_is_finished(
    demo_generator: Generator, tmp_path: Path
) -> None:
    source = InputConfig(path=str(ROOT / "models/demo/heldout_math.jsonl"), prompt_template="{question}\n")
    run = demo_generator.run.model_copy(
        update={"input": source, "output": OutputConfig(path=str(tmp_path / "o.jsonl"))}
    )
    engine = demo_generator.engine
    assert isinstance(engine, CudaEngine)
    launch = engine._launch

    def run_out(plan: StepPlan) -> PredictionOrder:
        if engine.num_steps == 60:
            torch.empty(2**42, dtype=torch.uint8, device="cuda")
        return launch(plan)

    engine._launch = run_out  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="rank 0, step 60: out of device memory; lower max_num_requests"):
        run_batch(demo_generator.profile, run, lambda: demo_generator)
    records = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(records) >= 2 and all("text" in record for record in records)


def predict(model: Path, engine: CudaEngine, num_rows: int, num_cached: int) -> Predictions:
    """Return the predictions of a step after `num_cached` positions of a committed prompt."""
    config = load_model_config(model)
    if num_cached:
        prompt = synthetic_plan(config, num_rows=1, width=num_cached, num_cached=0, read_share=0.1)
        prompt = prompt._replace(commits=(CommitSpan(0, 0, 0, num_cached),))
        engine.forward(prompt)
        engine.commit(prompt, np.zeros(1, dtype=np.int64))
    # At its first step too, of a slot that keeps what it has cached.
    return engine.forward(synthetic_plan(config, num_rows=num_rows, width=40, num_cached=num_cached, read_share=1.0))
