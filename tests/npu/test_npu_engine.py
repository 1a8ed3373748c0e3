"""The whole engine on simulated devices: literal npu tensors, the real torch_npu, HCCL groups. Its tokens are those of
the ref lane, and what a step launches is counted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from completing import completions_of

import lopa_ascend.assemble as assembling
from common.checkpoint import load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.config.profile import NpuConfig
from common.decoding import GenerationRequest, Sampling, Scheduler, decode_requests
from lopa_ascend.assemble import assemble
from lopa_ascend.engine import AscendEngine
from lopa_ascend.ops import AttentionForm, Ops, reference_ops
from lopa_ascend.ops.twins import quant
from lopa_ascend.shapes import Shapes
from lopa_ascend.steps import folder_of
from quant.linear import QuantizedLinear
from tests.conftest import GOLDEN
from tests.distributed.ascend_launch import ENVIRONMENT, decoded, write_model
from tests.soaking import soaking

pytestmark = pytest.mark.sim
MODEL = GOLDEN / "model_b"
DEMO = GOLDEN.parents[1] / "models" / "demo"
PROMPTS = [[(13 * n * n + 7 * m + n) % 290 + 2 for m in range(length)] for n, length in enumerate((118, 30))]
FEW = {"token_buckets": [80, 176], "row_buckets": [8, 16]}  # a compilation takes half a second a shape
ATTENTION = {
    "npu::npu_apply_rotary_pos_emb": 1,
    "npu::npu_scatter_pa_kv_cache": 1,
    "npu::npu_fused_infer_attention_score": 1,
}
LAYER = {
    None: {**ATTENTION, "npu::npu_add_rms_norm": 2, "npu::npu_swiglu": 1},
    "w8a8": {
        **ATTENTION,
        "npu::npu_add_rms_norm_dynamic_quant": 2,
        "npu::npu_quant_matmul": 4,
        "npu::npu_dynamic_quant": 1,
        "npu::npu_dequant_swiglu_quant": 1,
    },
}
# The first norm has no residual to add yet, and the last feeds the head, which is not quantized.
ENDS = {
    None: {"npu::npu_rms_norm": 1},
    "w8a8": {
        "npu::npu_rms_norm": 1,
        "npu::npu_dynamic_quant": 1,
        "npu::npu_add_rms_norm": 1,
        "npu::npu_add_rms_norm_dynamic_quant": -1,
    },
}


def causal(**settings: Any) -> DecodeConfig:
    return DecodeConfig.model_validate(
        {"num_lookahead": 3, "block_size": 16, "max_new_tokens": 32, "window_attention": "block_causal", **settings}
    )


def engine_on(
    device: str, decode: DecodeConfig, quantization: str | None, mode: str = "eager", model: Path = MODEL,
    cache_dir: Path | None = None, shapes: dict[str, list[int]] | None = None, **more: Any,
) -> AscendEngine:  # fmt: skip
    npu: dict[str, Any] = {**(shapes or (FEW if mode == "npugraph_ex" else {})), **more.pop("npu", {})}
    graph = {"mode": mode, "token_buckets": npu.pop("token_buckets", ())}
    if cache_dir is not None:
        npu["cache_dir"] = str(cache_dir)
    profile = DeviceProfile.model_validate(
        {
            "name": "test", "engine": "lopa_ascend", "device": device, "dtype": "bfloat16",
            "quantization": quantization, "max_model_len": 256,
            "graph": graph, "npu": npu, **more,
        }
    )  # fmt: skip
    return assemble(profile, RunConfig(model=str(model), decode=decode, max_num_requests=2))


def decode_all(
    engine: AscendEngine, decode: DecodeConfig, prompts: list[list[int]] = PROMPTS, model: Path = MODEL
) -> dict[str, tuple[int, ...]]:
    return {id: done.canvas_token_ids for id, done in completions_of(engine, model, decode, prompts).items()}


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize(
    ("settings", "quantization"),
    [
        ({"shift_row": "fresh"}, "w8a8"),
        ({"temperature": 0.7}, None),
        pytest.param({"shift_row": "fresh"}, None, marks=pytest.mark.slow),
        pytest.param({"temperature": 0.7}, "w8a8", marks=pytest.mark.slow),
    ],
    ids=["fresh-w8a8", "sampled", "fresh", "sampled-w8a8"],
)
def test_the_engine_gives_the_tokens_of_the_ref_lane(quantization: str | None, settings: dict[str, Any]) -> None:
    decode = causal(**settings)
    found = decode_all(engine_on("npu", decode, quantization), decode)
    assert found == decode_all(engine_on("cpu", decode, quantization), decode)


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("mode", ["eager", "npugraph", pytest.param("npugraph_ex", marks=soaking)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_log_probabilities_are_those_of_the_ref_lane(mode: str, temperature: float) -> None:
    """They are after replays too: they are no part of a graph."""
    decode = causal(shift_row="fresh", temperature=temperature)
    found, wanted = told(engine_on("npu", decode, None, mode), decode), told(engine_on("cpu", decode, None), decode)
    for id, (tokens, logprobs) in wanted.items():
        assert found[id][0] == tokens and len(logprobs) == len(tokens)
        assert found[id][1] == pytest.approx(logprobs, abs=1e-4)


def told(engine: AscendEngine, decode: DecodeConfig) -> dict[str, tuple[tuple[int, ...], list[float]]]:
    requests = [GenerationRequest(str(n), tuple(prompt), num_logprobs=2) for n, prompt in enumerate(PROMPTS)]
    found = completions_of(engine, MODEL, decode, requests)
    return {id: (done.token_ids, [one.logprob for one in done.logprobs]) for id, done in found.items()}


@pytest.mark.parametrize("mode", ["eager", "npugraph", pytest.param("torchair", marks=soaking)])
def test_a_head_in_eight_bits_gives_the_tokens_of_the_ref_lane(npu: Any, mode: str) -> None:
    decode = causal(shift_row="fresh")
    engines = (
        engine_on("npu", decode, "w8a8", mode, quantize_lm_head=True),
        engine_on("cpu", decode, "w8a8", quantize_lm_head=True),
    )
    assert all(isinstance(engine.model.lm_head, QuantizedLinear) for engine in engines)
    found, wanted = (decode_all(engine, decode) for engine in engines)
    assert found == wanted


def cache_copies(npu: Any, engine: AscendEngine) -> list[str]:
    """Operators that copy something of a cache's size."""
    shape = str(list(engine.cache.layers[0][0].shape))
    copying = [call for call in npu.stream if any(word in call.op for word in ("clone", "copy", "functional"))]
    return [call.op for call in copying if any(shape in argument for argument in call.arguments)]


@pytest.mark.filterwarnings("ignore:.*output of this custom operator")  # an .out overload returns what it was given
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
@pytest.mark.parametrize(
    ("mode", "quantization"),
    [pytest.param("npugraph", None, marks=pytest.mark.slow), ("npugraph", "w8a8"), ("npugraph_ex", None)],
)
def test_graphs_give_the_tokens_of_the_ref_lane(npu: Any, mode: str, quantization: str | None) -> None:
    """npugraph_ex in 8 bits: test_a_second_start_compiles_nothing."""
    decode = causal(shift_row="fresh")
    engine = engine_on("npu", decode, quantization, mode)
    num_ahead = engine.layers.num_captured
    assert num_ahead >= 2
    npu.stream.clear()
    found = decode_all(engine, decode)
    assert found == decode_all(engine_on("cpu", decode, quantization), decode)
    replays = [entry.run for entry in engine.layers._entries.values()]
    num_updates = sum(replay.num_updates for replay in replays)
    print(f"{mode}: {len(replays)} graphs, {num_ahead} ahead, {num_updates} updates in {engine.num_steps} steps")
    assert cache_copies(npu, engine) == []
    assert num_updates < engine.num_steps
    assert list(engine.length_updates_ms()) == ["lengths kept", "written after", "written before"]


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("attention", [{"attention": "v2"}, {"writes_kv_by_atb": True}], ids=["v2", "atb"])
def test_replays_in_other_forms_give_the_same_tokens(npu: Any, attention: dict[str, Any]) -> None:
    """Version 2, and KV written by the operator of older releases."""
    decode = causal()
    wanted = decode_all(engine_on("cpu", decode, None), decode)
    npu.counts.clear()
    if "attention" in attention:
        engine = engine_on("npu", decode, None, "npugraph", shapes=FEW, npu=attention)
        used = "npu::npu_fused_infer_attention_score_v2.out"
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assembling, "settle", lambda ops, *_: ops.with_kv_writes_by_atb())
            engine = engine_on("npu", decode, None, "npugraph", shapes=FEW)
        used = "atb::_npu_reshape_and_cache"
    before = npu.counts[used]
    assert decode_all(engine, decode) == wanted
    assert npu.counts[used] > before


def test_the_fused_kv_write_is_one_kernel_instead_of_five(npu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """kernels: triton, captured; the simulated device computes the kernel's twin."""
    decode, fused = causal(), "lopa::rotate_and_write"
    wanted = decode_all(engine_on("cpu", decode, "w8a8"), decode)
    monkeypatch.setattr("lopa_ascend.limits.require_triton", lambda: None)
    engine = engine_on("npu", decode, "w8a8", "npugraph", shapes=FEW, kernels="triton")
    npu.counts.clear()
    assert decode_all(engine, decode) == wanted
    num_passes, rest = divmod(npu.counts[fused], load_model_config(MODEL).num_layers)
    assert num_passes >= engine.num_steps and rest == 0  # one pass more for each shape that is captured meanwhile
    assert npu.counts["npu::npu_apply_rotary_pos_emb"] == npu.counts["npu::npu_scatter_pa_kv_cache"] == 0
    assert npu.counts["aten::clone"] == 0


@pytest.mark.parametrize("mode", ["eager", "npugraph"])
def test_gate_and_up_in_one_operator_give_the_same_tokens(npu: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = causal()
    wanted = decode_all(engine_on("cpu", decode, "w8a8"), decode)
    monkeypatch.setattr(assembling, "settle", lambda ops, *_: ops.with_fused_gate_up())
    engine = engine_on("npu", decode, "w8a8", mode, shapes=FEW)
    npu.counts.clear()
    assert decode_all(engine, decode) == wanted
    assert npu.counts["npu::npu_dequant_swiglu_quant"] == 0
    assert npu.counts["npu::npu_grouped_matmul_swiglu_quant_v2"] == npu.counts["npu::npu_quant_matmul"] / 3


@pytest.mark.usefixtures("npu")
def test_shapes_that_the_device_refuses_to_capture_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CANN 207008, from the fourth capture on: said once of layers and once of heads."""
    decode, num_begun, begin = causal(shift_row="fresh"), [], torch.npu.graph.__enter__
    wanted = decode_all(engine_on("cpu", decode, None), decode)

    def refuses(graph: Any) -> Any:
        num_begun.append(graph)
        if len(num_begun) > 3:
            raise RuntimeError("aclmdlRICaptureBegin: error code is 207008\nStream resources are insufficient")
        return begin(graph)

    monkeypatch.setattr(torch.npu.graph, "__enter__", refuses)
    engine = engine_on("npu", decode, None, "npugraph", npu={"selftest": "off"})
    assert decode_all(engine, decode) == wanted
    assert engine.layers.num_captured + engine.head.num_captured == 3
    refused = [record.getMessage() for record in caplog.records if "cannot be captured" in record.getMessage()]
    assert [line.split()[0] for line in refused] == ["layers", "head"] and "207008" in refused[0]


@pytest.mark.usefixtures("npu")
def test_a_replay_behind_a_step_that_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts are longer than the largest captured shape; the steps after them are replayed."""
    decode = causal(shift_row="fresh")
    engine = engine_on("npu", decode, None, "npugraph", shapes={"token_buckets": [40, 80], "row_buckets": [8]})
    kinds, layers_key = [], engine.layers_key

    def noted(*given: Any) -> Any:
        kinds.append(layers_key(*given))
        return kinds[-1]

    monkeypatch.setattr(engine, "layers_key", noted)
    assert decode_all(engine, decode) == decode_all(engine_on("cpu", decode, None), decode)
    is_replayed = [key.is_captured for key in kinds]
    assert is_replayed[0] is False and any(is_replayed)


@pytest.mark.filterwarnings("ignore:.*output of this custom operator")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_a_second_start_compiles_nothing(npu: Any, tmp_path: Path) -> None:
    """npu.cache_dir: what the first start compiled is found, and its KV writes are still in place."""
    from torch._dynamo.utils import counters

    decode = causal(shift_row="fresh")
    wanted = decode_all(engine_on("cpu", decode, "w8a8"), decode)
    num_compiled = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        npu.stream.clear()
        engine = engine_on("npu", decode, "w8a8", "npugraph_ex", cache_dir=tmp_path)
        assert decode_all(engine, decode) == wanted
        assert cache_copies(npu, engine) == []
        num_compiled.append(counters["stats"]["unique_graphs"])
    assert num_compiled == [engine.layers.num_captured, 0]
    (folder,) = tmp_path.iterdir()
    kept = sorted(path.name for path in folder.glob("*/forward_*"))
    assert len(kept) == num_compiled[0]
    print(f"{len(kept)} graphs kept, such as {kept[0]}")


@pytest.mark.usefixtures("torch_npu")
def test_another_model_mesh_or_precision_has_another_cache(tmp_path: Path) -> None:
    config = load_model_config(MODEL)
    settings = {"name": "p", "engine": "lopa_ascend", "device": "npu", "npu": {"cache_dir": str(tmp_path)}}
    others: list[dict[str, Any]] = [
        {}, {"quantization": "w8a8"}, {"dtype": "float16"}, {"mesh": {"tensor_parallel_size": 4}},
        {"npu": {"weight_prefetch_mb": 18, "cache_dir": str(tmp_path)}}, {"graph": {"mode": "torchair"}},
    ]  # fmt: skip
    profiles, ops = [DeviceProfile.model_validate(settings | other) for other in others], reference_ops()
    folders = [folder_of(profile, config, ops) for profile in profiles]
    folders.append(folder_of(profiles[0], config, ops.with_attention(AttentionForm(2, 3))))
    folders.append(folder_of(profiles[0], config, ops.with_kv_writes_by_atb()))
    folders.append(folder_of(profiles[0], replace(config, rms_norm_eps=1e-5), ops))
    assert len(set(folders)) == len(folders)
    assert folder_of(profiles[0], config, ops) == folders[0]
    assert folder_of(profiles[0].model_copy(update={"npu": NpuConfig()}), config, ops) is None


@pytest.mark.parametrize("quantization", [None, "w8a8"])
def test_what_a_step_launches(npu: Any, quantization: str | None) -> None:
    """One kernel an operation of a layer, and no copy of KV pages in a step that no row joins."""
    decode, per_step = causal(), []
    engine = engine_on("npu", decode, quantization)
    launch, receive = engine.launch, engine.receive

    def launch_counted(plan: Any) -> None:
        npu.counts.clear()
        launch(plan)

    def receive_counted() -> Any:
        predictions = receive()
        per_step.append(Counter(npu.counts))
        return predictions

    engine.launch, engine.receive = launch_counted, receive_counted  # type: ignore[method-assign]
    decode_all(engine, decode)
    usual = per_step[5]
    expected = Counter(ENDS[quantization])
    for op, count in LAYER[quantization].items():
        expected[op] += count * load_model_config(MODEL).num_layers
    assert {op: count for op, count in usual.items() if op.startswith("npu::")} == dict(expected)
    # The upload, the predictions into their buffer and from there to the host.
    assert usual["aten::copy_"] == 3
    print(f"{quantization or 'bf16'}: {usual.total()} calls, {dict(usual)}")


# The config of one rank of TP4, with a smaller vocabulary, whose operators are torch's own.
DREAM_7B_TP4 = {
    "model_type": "Dream", "vocab_size": 1024, "hidden_size": 3584, "intermediate_size": 4736,
    "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 2048,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "mask_token_id": 1000, "eos_token_id": 1001,
}  # fmt: skip


# A layer: what LAYER says, in bf16 four products besides, and the copies of query, key and value out of qkv's product.
KERNELS_A_LAYER = {"w8a8": sum(LAYER["w8a8"].values()) + 3, None: sum(LAYER[None].values()) + 4 + 3}
PRODUCTS = {"w8a8": ("npu::npu_quant_matmul",), None: ("aten::matmul", "aten::mm", "aten::addmm")}
WEIGHTS = [(3584, 1152), (896, 3584), (3584, 9472), (4736, 3584)]
HEAD_KERNELS = 25  # neg_entropy; test_npu_head
# What these kernels must read and write of a token: 76 KB are the int32 of gate and up. One more copy of a hidden state
# would be 14 KB.
ACTIVATION_BYTES_A_TOKEN = {"w8a8": 182_000, None: 164_000}


@pytest.fixture
def without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their factors are checked, their results are zeros."""
    from sim.device import SimulatedNpu

    run_on_host = SimulatedNpu._run_on_host

    def run(device: Any, call: Any, args: Any, kwargs: Any) -> Any:
        if call.name not in PRODUCTS[None]:
            return run_on_host(device, call, args, kwargs)
        left, right = args[-2:]
        assert left.shape[1] == right.shape[0] and left.dtype == right.dtype == torch.bfloat16
        return torch.zeros(left.shape[0], right.shape[1], dtype=left.dtype)

    monkeypatch.setattr(SimulatedNpu, "_run_on_host", run)
    monkeypatch.setattr(quant, "int8_matmul", lambda x1, x2: torch.zeros(len(x1), x2.shape[1], dtype=torch.int32))


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("quantization", [None, "w8a8"])
@pytest.mark.parametrize(
    ("mode", "num_layers"), [pytest.param("eager", 1, marks=pytest.mark.slow), ("npugraph", 2), ("torchair", 1)]
)
def test_every_call_at_dream_7b_shapes_is_accepted_and_a_layer_keeps_its_budget(
    npu: Any, mode: str, num_layers: int, quantization: str | None, tmp_path: Path
) -> None:
    """torch_npu's schemas, its meta kernels and the documented rules hold for all of a request (products are not
    computed). A layer reads its weights once, the KV once for every virtual row, and copies nothing of that size."""
    (tmp_path / "config.json").write_text(json.dumps({**DREAM_7B_TP4, "num_hidden_layers": num_layers}))
    decode = causal(num_lookahead=1, block_size=32, max_new_tokens=96, shift_row="fresh", skip_threshold=0.0005)
    profile = DeviceProfile.model_validate(
        {
            "name": "test", "engine": "lopa_ascend", "device": "npu", "quantization": quantization,
            "max_model_len": 1024,
            "graph": {"mode": mode, "token_buckets": [80, 160]}, "npu": {"row_buckets": [4, 8]},
        }
    )  # fmt: skip
    engine = assemble(profile, RunConfig(model=str(tmp_path), load_format="dummy", decode=decode))
    streams: list[list[Any]] = []
    traffic: list[Any] = []
    launch = engine.launch

    def recorded(plan: Any) -> None:
        npu.stream.clear()
        npu.traffic.clear()
        launch(plan)
        streams.append(list(npu.stream))
        traffic[:] = npu.traffic

    engine.launch = recorded  # type: ignore[method-assign]
    scheduler = Scheduler(decode, mask_token_id=1000, eos_token_id=None)
    (completion,) = decode_requests(iter([GenerationRequest("0", (5,) * 500)]), scheduler, engine)
    last = streams[-1]  # a usual step: nothing is captured in it
    dtype = "bfloat16" if quantization is None else "int8"
    wanted = {f"{dtype}[{k}, {n}]": num_layers for k, n in WEIGHTS}
    products = [call for call in last if call.op in PRODUCTS[quantization]]
    assert Counter(part for call in products for part in call.arguments if part in wanted) == wanted
    assert cache_copies(npu, engine) == []
    num_distinct = len({call for stream in streams for call in stream if call.op.startswith("npu::")})
    print(f"{mode}: {completion.num_forwards} steps, {num_distinct} distinct npu calls")
    if num_layers == 2:
        first, second = (place for place, call in enumerate(traffic) if call.op == "npu::npu_scatter_pa_kv_cache")
        check_budget(traffic[first:second], engine, quantization)
        check_step_budget(traffic, num_layers, engine, quantization)


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("quantization", [pytest.param(None, marks=pytest.mark.slow), "w8a8"])
def test_every_shape_that_may_be_captured_is_accepted(
    npu: Any, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All token counts at one number of virtual rows, all of those at one token count, and the heads: the default
    shapes of a profile, at Dream-7B's sizes."""
    monkeypatch.setattr("lopa_ascend.assemble.warm_up", lambda *_: None)
    (tmp_path / "config.json").write_text(json.dumps({**DREAM_7B_TP4, "num_hidden_layers": 1}))
    profile = DeviceProfile.model_validate(
        {
            "name": "test", "engine": "lopa_ascend", "device": "npu", "quantization": quantization,
            "max_model_len": 256, "graph": {"mode": "npugraph"},
        }
    )  # fmt: skip
    decode = causal()
    engine = assemble(profile, RunConfig(model=str(tmp_path), load_format="dummy", decode=decode))
    shapes, sampling = Shapes.of((), (), 48), Sampling("neg_entropy", 1000)
    npu.stream.clear()
    with torch.no_grad():
        for num_tokens in shapes.tokens:
            engine.layers.entry(engine.captured_key(num_tokens, 4))
            engine.head.entry(engine.reads_key(num_tokens, sampling))
        for num_rows in shapes.rows:
            engine.layers.entry(engine.captured_key(256, num_rows))
    calls = [call for call in npu.stream if "attention_score" in call.op]
    queries = {call.arguments[0] for call in calls}
    assert queries == {f"bfloat16[{num_tokens}, 7, 128]" for num_tokens in (*shapes.tokens, 256)}
    tables = {part for call in npu.stream if "attention_score" in call.op for part in call.arguments if "int32" in part}
    assert tables == {f"block_table=int32[{num_rows}, 2]" for num_rows in shapes.rows}
    print(f"{engine.layers.num_captured} shapes of layers, {engine.head.num_captured} of the head: {shapes}")


def check_budget(layer: list[Any], engine: AscendEngine, quantization: str | None) -> None:
    """Check the calls from one layer's KV write to the next."""
    layer = [call for call in layer if not call.op.endswith(("workspace", "infer_output"))]  # of a capture's host side
    assert len(layer) == KERNELS_A_LAYER[quantization], [call.op for call in layer]
    (attention,) = (call for call in layer if call.kv)
    num_tokens, kv_lengths = engine._rows.query_ends[-1], engine._rows.kv_lengths
    assert attention.kv == sum(kv_lengths) * 2 * 128 * 2
    weights, moved = weight_bytes(quantization), sum(call.total for call in layer)
    activations = (moved - weights - attention.kv) / num_tokens
    print(
        f"{quantization or 'bf16'}, a layer of {num_tokens} tokens, {len(kv_lengths)} virtual rows: "
        f"{len(layer)} kernels, {moved / 1e6:.1f} MB: "
        f"weights {weights / 1e6:.1f}, KV {attention.kv / 1e6:.2f}, {activations / 1e3:.0f} KB of activations a token"
    )
    assert activations <= ACTIVATION_BYTES_A_TOKEN[quantization]


FORMS = {
    "gate and up": (Ops.with_fused_gate_up, ["npu_quant_matmul", "npu_dequant_swiglu_quant"], 75_776),
    "rotation and KV write": (Ops.with_fused_kv_write, ["npu_apply_rotary_pos_emb", "npu_scatter_pa_kv_cache"], 7_168),
}


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("form", FORMS)
def test_an_operator_that_stands_for_several_saves_launches_and_bytes(
    npu: Any, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured, at Dream-7B's TP4 shapes: one operator of a layer less, and the int32 of gate and up; four of rotation
    and KV write less, and the copies of query, key and value."""
    fused, replaced, saved_bytes = FORMS[form]
    (tmp_path / "config.json").write_text(json.dumps({**DREAM_7B_TP4, "num_hidden_layers": 2}))
    layers = []
    for settle in (lambda ops, *_: ops, lambda ops, *_: fused(ops)):
        monkeypatch.setattr(assembling, "settle", settle)
        layers.append(layer_traffic(npu, tmp_path))
    apart, together = (Counter(call.op for call in layer) for layer in layers)
    num_copies = 3 if form != "gate and up" else 0
    assert all(together[f"npu::{op}"] == apart[f"npu::{op}"] - 1 for op in replaced)
    assert apart["aten::clone"] - together["aten::clone"] == num_copies
    assert apart.total() - together.total() == len(replaced) + num_copies - 1
    bytes_apart, bytes_together = (sum(call.total for call in layer) for layer in layers)
    a_token = (bytes_apart - bytes_together) / 80
    print(f"{form}: {apart.total()} -> {together.total()} kernels a layer, {a_token / 1e3:.1f} KB a token less")
    assert abs(a_token - saved_bytes) < 0.02 * saved_bytes


def layer_traffic(npu: Any, model: Path) -> list[Any]:
    """What one layer of a step of 80 tokens launches and moves, from one attention to the next."""
    profile = DeviceProfile.model_validate(
        {
            "name": "test", "engine": "lopa_ascend", "device": "npu", "quantization": "w8a8", "max_model_len": 256,
            "graph": {"mode": "npugraph", "token_buckets": [80]}, "npu": {"row_buckets": [4], "selftest": "off"},
        }
    )  # fmt: skip
    engine = assemble(profile, RunConfig(model=str(model), load_format="dummy", decode=causal()))
    entry = engine.layers.entry(engine.captured_key(80, 4))
    npu.traffic.clear()
    entry.run()
    first, second = (place for place, call in enumerate(npu.traffic) if call.kv)
    return npu.traffic[first:second]


def weight_bytes(quantization: str | None) -> int:
    return sum(k * n for k, n in WEIGHTS) * (1 if quantization else 2)


def check_step_budget(step: list[Any], num_layers: int, engine: AscendEngine, quantization: str | None) -> None:
    """Check what is read beside layers and the head's weight: 20 passes over hidden states (embedding, first and last
    norm, what the head reads) and 14 over float32 logits. Beside the kernels of layers and head 13 calls: upload,
    lookups, first and last norm, what is read, results."""
    num_tokens, vocab, width = engine._rows.query_ends[-1], 1024, 3584
    weights = num_layers * weight_bytes(quantization) + vocab * width * 2
    kv, moved = sum(call.kv for call in step), sum(call.total for call in step)
    rest = moved - weights - kv - num_layers * num_tokens * ACTIVATION_BYTES_A_TOKEN[quantization]
    print(
        f"a step of {num_layers} layers: {len(step)} calls, {moved / 1e6:.1f} MB, {weights / 1e6:.1f} of them weights"
    )
    assert rest <= num_tokens * (20 * width * 2 + 14 * vocab * 4)
    assert len(step) <= num_layers * KERNELS_A_LAYER[quantization] + HEAD_KERNELS + 13


@pytest.fixture(scope="module")
def both_axes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model, and its tokens over TP2 x BP2 of the ref lane."""
    folder = tmp_path_factory.mktemp("axes")
    model = write_model(folder)
    return model, decoded(model, folder / "ref", (1, 2, 2), ["k=3 fresh"], dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("mode", ["npugraph_ex", "torchair"])
def test_graphs_hold_the_collectives_of_both_axes(
    tmp_path: Path, mode: str, both_axes: tuple[Path, dict[str, Any]]
) -> None:
    """TP2 x BP2: the sums over tp in the layers, the gathers over tp and bp in the head; compiled and captured, or as
    HcomAllReduce and HcomAllGather by their groups' HCCL names. TP2 alone, with prefetches: test_npu_prefetch."""
    model, wanted = both_axes
    shape = {"graph": {"mode": mode, "token_buckets": [176]}, "npu": {"row_buckets": [16]}}
    graphs = decoded(model, tmp_path / "graphs", (1, 2, 2), ["k=3 fresh"], device="npu", dtype="bfloat16", **shape)
    assert graphs == wanted


@pytest.mark.usefixtures("torch_npu")
def test_ranks_that_round_sums_differently_decode_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TP2, captured, with HCCL_DETERMINISTIC false: `decoded` compares what the ranks say, who would part, and meet in
    collectives that do not pair, if one chose by sums of its own."""
    monkeypatch.setitem(ENVIRONMENT, "HCCL_DETERMINISTIC", "false")
    shape = {"graph": {"mode": "npugraph", "token_buckets": [176]}, "npu": {"row_buckets": [16]}}
    model, settings = write_model(tmp_path), ["k=3 fresh"]
    tokens = decoded(model, tmp_path / "out", (1, 1, 2), settings, device="npu", dtype="bfloat16", **shape)
    assert len(tokens["k=3 fresh"]) == 3


@soaking
@pytest.mark.usefixtures("torch_npu")
def test_sixteen_devices_decode_what_the_ref_lane_does(tmp_path: Path) -> None:
    """TP4 x BP4 with HCCL groups per axis; in bfloat16, whose sums over tp are rounded on both alike."""
    model, mesh, settings = write_model(tmp_path), (1, 4, 4), ["k=3 fresh"]
    found = decoded(model, tmp_path / "npu", mesh, settings, device="npu", dtype="bfloat16")
    assert found == decoded(model, tmp_path / "ref", mesh, settings, dtype="bfloat16")
