"""The Ascend engine in its ref lane: the golden traces, and the tokens of the plain CUDA engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from completing import completions_of

from common.checkpoint import load_model_config, quantizable
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import Engine, GenerationRequest, Scheduler, decode_requests
from common.errors import ConfigError, EngineError, MissingCapability
from common.evaluation.parity import first_difference
from common.evaluation.trace import read_trace
from common.platforms import build_engine
from lopa_ascend.assemble import assemble
from lopa_ascend.engine import AscendEngine
from lopa_ascend.kv import PAGE_SIZE
from quant.calibration import calibrate
from quant.quantize import quantize_folder
from tests.conftest import GOLDEN
from tests.engine.lopa_ascend.watching import Agreement, WatchingEngine

MODEL = GOLDEN / "model_a"
TRACES = sorted(GOLDEN.glob("0[567]_causal_*.json"))
LENGTHS = (24, 5, 118, 131, 250)  # within a page, up to its border, beyond it
PROMPTS = [[(13 * n * n + 7 * m + n) % 290 + 2 for m in range(length)] for n, length in enumerate(LENGTHS)]


def profile(engine: str = "lopa_ascend", dtype: str = "float32", **settings: Any) -> DeviceProfile:
    settings = {"name": "test", "engine": engine, "device": "cpu", "dtype": dtype, "max_model_len": 512, **settings}
    return DeviceProfile.model_validate(settings)


def causal(**settings: Any) -> DecodeConfig:
    return DecodeConfig.model_validate(
        {"num_lookahead": 3, "block_size": 16, "max_new_tokens": 64, "window_attention": "block_causal", **settings}
    )


def run_of(decode: DecodeConfig, num_requests: int = 1, model: Path = MODEL) -> RunConfig:
    return RunConfig(model=str(model), decode=decode, max_num_requests=num_requests)


def decode_all(engine: Engine, decode: DecodeConfig, prompts: list[list[int]] = PROMPTS) -> dict[str, tuple[int, ...]]:
    found = completions_of(engine, MODEL, decode, prompts)
    return {id: (done.num_forwards, *done.canvas_token_ids) for id, done in found.items()}


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_every_step_of_the_trace_is_reproduced(path: Path) -> None:
    trace = read_trace(path)
    assert first_difference(trace, GOLDEN / trace.model, profile()) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shift_row": "fresh"},
        {"shift_row": "fresh", "num_lookahead": 7, "block_add_threshold": 0.0, "block_size": 8},
        {"shift_row": "fresh", "num_lookahead": 0},
        {"temperature": 0.7, "top_p": 0.9},
        {"sampling_strategy": "margin", "block_size": 32},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "plain",
)
def test_tokens_are_those_of_the_cuda_engine(settings: dict[str, Any]) -> None:
    """Several requests of different length at once, on both."""
    decode = causal(**settings)
    found = decode_all(build_engine(profile(), run_of(decode, len(PROMPTS))), decode)
    wanted = decode_all(build_engine(profile("lopa_cuda"), run_of(decode, len(PROMPTS))), decode)
    assert found == wanted


@pytest.mark.slow
@pytest.mark.parametrize("shift_row", ["stale", "fresh"])
def test_a_request_alone_or_among_others_gets_the_same_tokens(shift_row: str) -> None:
    decode = causal(shift_row=shift_row)
    together = decode_all(build_engine(profile(), run_of(decode, len(PROMPTS))), decode)
    engine = build_engine(profile(), run_of(decode))
    for n, prompt in enumerate(PROMPTS):
        assert decode_all(engine, decode, [prompt])["0"] == together[str(n)]


class OneAfterAnother:
    """The engine without its two calls: nothing happens while it computes."""

    def __init__(self, engine: AscendEngine) -> None:
        self.capacity, self.mesh = replace(engine.capacity, gives_logprobs=False), engine.mesh
        self.forward, self.commit = engine.forward, engine.commit


@pytest.mark.slow
def test_what_the_host_does_meanwhile_changes_no_token() -> None:
    decode, num_slots = causal(shift_row="fresh"), 2
    engine = assemble(profile(), run_of(decode, num_slots))
    wanted = decode_all(OneAfterAnother(engine), decode)  # type: ignore[arg-type]
    assert decode_all(engine, decode) == wanted
    scheduler = Scheduler(decode, mask_token_id=310, eos_token_id=None, num_slots=num_slots)
    next(decode_requests(iter([GenerationRequest(str(n), (5, 6)) for n in range(9)]), scheduler, engine))
    assert decode_all(engine, decode) == wanted, "a step was under way when its results were no longer asked for"


def test_a_failed_step_names_rank_and_step_and_leaves_the_groups_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("HCCL error\nand a long story")

    def leave() -> None:
        raise AssertionError("a peer may be stuck in a collective")

    engine = assemble(profile(), run_of(causal(), 1))
    decode_all(engine, causal(), PROMPTS[:1])
    monkeypatch.setattr(engine, "_launch", fail)
    monkeypatch.setattr("common.runtime.engine.close_mesh", leave)
    with pytest.raises(EngineError, match=rf"rank 0, step {engine.num_steps}: HCCL error$"):
        decode_all(engine, causal(), PROMPTS[:1])
    engine.close()


@pytest.mark.slow
def test_requests_wait_when_pages_run_out_and_get_their_tokens_all_the_same() -> None:
    decode = causal()
    wanted = decode_all(build_engine(profile(), run_of(decode, len(PROMPTS))), decode)
    engine = assemble(profile(), run_of(decode, len(PROMPTS)), num_pages=11)
    assert decode_all(engine, decode) == wanted
    pages = engine.describe()["kv_pages"]
    assert pages["total"] == 11 and 8 <= pages["most_in_use"] <= 11


def test_after_the_last_request_only_its_pages_are_held_and_the_next_step_frees_them() -> None:
    decode = causal()
    engine = assemble(profile(), run_of(decode, 2))
    for _ in range(3):
        decode_all(engine, decode, PROMPTS[:2])
    assert engine.kv.pool.num_used <= 1 + 4 * 2


@pytest.mark.parametrize("shift_row", ["stale", "fresh"])
def test_all_branches_hold_the_same_kv_of_a_finished_block(shift_row: str) -> None:
    """Which is why any of them can be committed, before the winner is known and without traffic."""
    decode = causal(shift_row=shift_row, num_lookahead=5)
    engine = WatchingEngine(assemble(profile(), run_of(decode, 2)))
    decode_all(engine, decode, PROMPTS[1:4])  # type: ignore[arg-type]
    assert engine.num_compared > 20


def agreement(leader: Engine, follower: Engine, decode: DecodeConfig, margin: float = 0.05) -> float:
    both = Agreement(leader, follower, margin)
    decode_all(both, decode)  # type: ignore[arg-type]
    assert both.num_read > 2000
    return both.num_equal / both.num_read


def cuda_and_ascend(dtype: str, decode: DecodeConfig, model: Path, **settings: Any) -> list[Engine]:
    run = run_of(decode, len(PROMPTS), model)
    return [build_engine(profile(name, dtype, **settings), run) for name in ("lopa_cuda", "lopa_ascend")]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "shift_row"), [("model_a", "stale"), ("model_b", "fresh")])
def test_bfloat16_predicts_what_the_cuda_engine_does(model: str, shift_row: str) -> None:
    decode = causal(shift_row=shift_row, sampling_strategy="margin")
    assert agreement(*cuda_and_ascend("bfloat16", decode, GOLDEN / model), decode) >= 0.99


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Quantized dynamically and statically; the model that is calibrated is one that has decoded the prompts."""
    out, decode = tmp_path_factory.mktemp("quantized"), causal(num_lookahead=0)
    engine: Any = build_engine(profile("lopa_cuda"), run_of(decode))
    calibration = calibrate(engine.model, [lambda: decode_all(engine, decode, PROMPTS[:2])])
    quantize_folder(MODEL, out / "w8a8_dynamic", quantizable(load_model_config(MODEL)))
    quantize_folder(MODEL, out / "w8a8", quantizable(load_model_config(MODEL)), "w8a8", calibration)
    return {scheme: out / scheme for scheme in ("w8a8_dynamic", "w8a8")}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8_dynamic", "w8a8"])
def test_a_quantized_folder_predicts_what_the_cuda_engine_does(folders: dict[str, Path], scheme: str) -> None:
    decode = causal(sampling_strategy="margin", num_lookahead=1)
    engines = cuda_and_ascend("float32", decode, folders[scheme], quantization="w8a8")
    assert agreement(*engines, decode) >= 0.99


@pytest.mark.slow
def test_a_quantized_folder_is_the_model_quantized_at_load(folders: dict[str, Path]) -> None:
    decode = causal(num_lookahead=1)
    from_folder, at_load = (
        build_engine(profile(quantization="w8a8"), run_of(decode, len(PROMPTS), model))
        for model in (folders["w8a8_dynamic"], MODEL)
    )
    assert decode_all(from_folder, decode) == decode_all(at_load, decode)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "full attention": ({}, {"window_attention": "full"}, ConfigError, "decode.window_attention to block_causal"),
    "vanilla": ({}, {"strategy": "vanilla", "window_attention": "full"}, ConfigError, "decode.strategy to d2f"),
    "float16": ({"dtype": "float16"}, {}, ConfigError, "set dtype to bfloat16 or float32"),
    "float32 on npu": ({"device": "npu"}, {}, ConfigError, "no float32 on npu: set dtype to bfloat16"),
    "fp8": ({"quantization": "fp8"}, {}, MissingCapability, "set quantization to w8a8"),
    "triton on a CPU": ({"kernels": "triton"}, {}, MissingCapability, "set kernels to auto"),
    "triton compiled": (
        {"kernels": "triton", "device": "npu", "dtype": "bfloat16", "graph": {"mode": "torchair"}},
        {},
        MissingCapability,
        "set graph.mode to npugraph, or kernels to auto",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_said_before_anything_is_loaded(case: str) -> None:
    of_profile, of_decode, error, fix = REFUSED[case]
    with pytest.raises(error, match=fix):
        build_engine(profile(**of_profile), run_of(causal(**of_decode), model=Path("nowhere")))


def test_a_run_switched_to_full_attention_later_is_refused_too() -> None:
    engine = build_engine(profile(), run_of(causal()))
    with pytest.raises(ConfigError, match="window_attention to block_causal"):
        decode_all(engine, causal(window_attention="full"), PROMPTS[:1])


def test_a_quantized_folder_needs_its_quantization_and_takes_no_adapter(folders: dict[str, Path]) -> None:
    model = folders["w8a8_dynamic"]
    with pytest.raises(ConfigError, match="add --set quantization=w8a8"):
        build_engine(profile(), run_of(causal(), model=model))
    run = run_of(causal(), model=model).model_copy(update={"lora_path": "adapter"})
    with pytest.raises(ConfigError, match="merge adapter first"):
        build_engine(profile(quantization="w8a8"), run)


def test_the_fingerprint_says_how_full_the_pages_were() -> None:
    engine = assemble(profile(), run_of(causal()))
    decode_all(engine, causal(), PROMPTS[:1])
    told = engine.describe()
    assert told["engine"] == "lopa_ascend" and told["dtype"] == "float32"
    assert 2 <= told["kv_pages"]["most_in_use"] <= told["kv_pages"]["total"]
    assert told["kv_cache_bytes"] == told["kv_pages"]["total"] * 2 * 2 * PAGE_SIZE * 2 * 128 * 4
