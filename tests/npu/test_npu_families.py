"""Block-causal families on simulated devices: the ref lane's tokens, eager and captured, and every call at the sizes of
published checkpoints accepted by torch_npu's schemas, meta kernels and documented rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sim import contract

from common.checkpoint import MoEConfig, load_model_config
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.decoding import Completion, GenerationRequest, Scheduler, decode_requests
from common.runtime import facts_of
from lopa_ascend.assemble import assemble
from lopa_ascend.engine import AscendEngine
from lopa_ascend.ops import HeadNorms, npu_ops
from lopa_ascend.ops.twins import experts
from tests.conftest import GOLDEN
from tests.soaking import soaking

pytestmark = pytest.mark.sim
FAMILIES = GOLDEN.parent / "golden_families"
PROMPTS = [[(13 * n * n + 7 * m + n) % 490 + 2 for m in range(length)] for n, length in enumerate((118, 30))]
FEW = {"token_buckets": [48, 176], "row_buckets": [16, 48]}  # a compilation takes half a second a shape
BLOCKS: dict[str, Any] = {
    "strategy": "block_diffusion", "max_new_tokens": 24, "num_lookahead": 1, "mask_token_id": 511, "stop_at_eos": False,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sdar": ("sdar/model_a", {**BLOCKS, "block_size": 4}),
    "llada2": ("llada2/model_a", {**BLOCKS, "block_size": 8}),
    "llada2_2": ("llada2_2/model_b", {**BLOCKS, "block_size": 16}),
    "llada2_2, revised": (
        "llada2_2/model_b",
        {
            **BLOCKS,
            "block_size": 16,
            "max_new_tokens": 16,
            "skip_threshold": 0.5,
            "strategy": {"name": "levenshtein", "edit_threshold": 0.3},
        },
    ),
    "fast_dllm_v2": ("fastdllm_v2/model_a", {**BLOCKS, "strategy": {"name": "fast_dllm_v2", "sub_block_size": 8}}),
}
# LLaDA2-mini and SDAR-30B-A3B on one rank of four: width, own experts, the mixture.
LLADA2_MINI = 2048, 64, MoEConfig(
    num_experts=256, experts_per_token=8, intermediate_size=512, num_shared_experts=1, num_groups=8, top_groups=4,
    scoring="sigmoid", normalise=True, scaling=2.5, first_dense=1, has_expert_bias=True,
)  # fmt: skip
SDAR_30B = 2048, 32, MoEConfig(
    num_experts=128, experts_per_token=8, intermediate_size=768, num_shared_experts=0, num_groups=1, top_groups=1,
    scoring="softmax", normalise=True, scaling=1.0, first_dense=0, has_expert_bias=False,
)  # fmt: skip

# Mixtures of experts are refused in torchair.
MODES = [
    ("sdar", "npugraph"), ("llada2", "eager"), ("llada2", "npugraph"), ("llada2_2", "npugraph"),
    ("llada2_2, revised", "npugraph"), ("fast_dllm_v2", "eager"),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (("llada2", "npugraph_ex"), ("sdar", "torchair"))),
    *(pytest.param(case, "npugraph_ex", marks=soaking) for case in ("sdar", "llada2_2", "fast_dllm_v2")),
    pytest.param("fast_dllm_v2", "torchair", marks=soaking),
]  # fmt: skip


@pytest.fixture
def model_of(tmp_path: Path) -> Any:
    """The checkpoint's folder; experts in groups of four, since the operator takes no smaller ones."""

    def found(name: str) -> Path:
        source = FAMILIES / name
        if not name.startswith("llada2/"):
            return source
        tree = {**json.loads((source / "config.json").read_text()), "n_group": 2, "topk_group": 1}
        (tmp_path / "config.json").write_text(json.dumps(tree))
        (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
        return tmp_path

    return found


def decoded(
    device: str, model: Path, decode: DecodeConfig, mode: str = "eager", quantization: str | None = None,
    load_format: str = "auto",
) -> tuple[AscendEngine, dict[str, Any]]:  # fmt: skip
    shapes = FEW if mode == "npugraph_ex" else {"token_buckets": [], "row_buckets": []}
    graph = {"mode": mode, "token_buckets": shapes["token_buckets"]}
    profile = DeviceProfile.model_validate(
        {
            "name": "test", "engine": "lopa_ascend", "device": device, "dtype": "bfloat16", "max_model_len": 256,
            "graph": graph, "npu": {"row_buckets": shapes["row_buckets"]}, "quantization": quantization,
        }
    )  # fmt: skip
    run = {"model": str(model), "decode": decode, "max_num_requests": 2, "load_format": load_format}
    engine = assemble(profile, RunConfig.model_validate(run))
    config = load_model_config(model)
    scheduler = Scheduler(decode, mask_token_id=511, eos_token_id=None, num_slots=2, facts=facts_of(config))
    requests = iter([GenerationRequest(str(n), tuple(prompt)) for n, prompt in enumerate(PROMPTS)])
    results = decode_requests(requests, scheduler, engine)
    return engine, {result.id: result.canvas_token_ids for result in results if isinstance(result, Completion)}


@pytest.mark.filterwarnings("ignore:.*output of this custom operator")  # an .out overload returns what it was given
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize(("case", "mode"), MODES)
def test_the_simulated_device_gives_the_tokens_of_the_ref_lane(case: str, mode: str, model_of: Any) -> None:
    name, settings = CASES[case]
    model, decode = model_of(name), DecodeConfig.model_validate(settings)
    engine, found = decoded("npu", model, decode, mode)
    assert found == decoded("cpu", model, decode)[1]
    assert len(found) == len(PROMPTS)
    assert (engine.graph_counts[0] > 0) is (mode != "eager")


@pytest.mark.parametrize(("width", "num_own", "moe"), [LLADA2_MINI, SDAR_30B], ids=["LLaDA2-mini", "SDAR-30B-A3B"])
@pytest.mark.parametrize("num_tokens", [4, 128])
def test_calls_at_published_sizes_are_accepted(
    npu: Any, monkeypatch: pytest.MonkeyPatch, num_tokens: int, width: int, num_own: int, moe: MoEConfig
) -> None:
    """Products are not computed."""
    monkeypatch.setattr(torch, "matmul", lambda x, weight: x.new_zeros(len(x), weight.shape[1]))
    ops = npu_ops()
    bias = torch.zeros(moe.num_experts).npu() if moe.has_expert_bias else None
    routing = ops.route(torch.randn(num_tokens, moe.num_experts).npu(), bias, moe)
    expert_TC = routing.expert_TC % num_own
    rows = ops.dispatch(torch.zeros(num_tokens, width).bfloat16().npu(), expert_TC, num_own)
    gate_up = torch.zeros(num_own, width, 2 * moe.intermediate_size).bfloat16().npu()
    down = torch.zeros(num_own, moe.intermediate_size, width).bfloat16().npu()
    inner = ops.swiglu(ops.grouped_matmul(rows.rows_ND, gate_up, rows.count_E))
    mixed = ops.combine(ops.grouped_matmul(inner, down, rows.count_E), rows.place_N, routing.weight_TC)
    assert (mixed.shape, mixed.dtype) == ((num_tokens, width), torch.bfloat16)
    gating = "npu_moe_gating_top_k" + ("" if moe.scoring == "sigmoid" else "_softmax")
    names = {gating, "npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_swiglu", "_npu_moe_token_unpermute"}
    called = {signature.op for signature in npu.signatures if signature.op.startswith("npu::")}
    assert called == {f"npu::{name}" for name in names}
    assert all(contract.has_meta_kernel(op) for op in called)


@pytest.mark.parametrize(("width", "num_own", "moe"), [LLADA2_MINI, SDAR_30B], ids=["LLaDA2-mini", "SDAR-30B-A3B"])
def test_calls_in_8_bits_at_published_sizes_are_accepted(
    npu: Any, monkeypatch: pytest.MonkeyPatch, width: int, num_own: int, moe: MoEConfig
) -> None:
    """Products are not computed."""
    monkeypatch.setattr(experts, "int8_matmul", lambda x, weight: torch.zeros(len(x), weight.shape[1]).int())
    ops, inner, num_tokens = npu_ops(), moe.intermediate_size, 128
    values, scale_T = ops.dynamic_quant(torch.randn(num_tokens, width).bfloat16().npu())
    expert_TC = (torch.arange(num_tokens * moe.experts_per_token) % num_own).int().view(num_tokens, -1).npu()
    rows = ops.dispatch(values, expert_TC, num_own, scale_T)
    gate_up = torch.zeros(num_own, width, 2 * inner, dtype=torch.int8).npu()
    down = torch.zeros(num_own, inner, width, dtype=torch.int8).npu()
    product = ops.grouped_matmul_int32(rows.rows_ND, gate_up, rows.count_E)
    scale_EI, scale_ED = torch.ones(num_own, 2 * inner).npu(), torch.ones(num_own, width).bfloat16().npu()
    gated = ops.dequant_swiglu_quant(product, scale_EI, rows.scale_N, count_E=rows.count_E)
    given = gated.values, down, rows.count_E, scale_ED, gated.scale_T
    assert ops.grouped_quant_matmul(*given, torch.bfloat16).dtype == torch.bfloat16
    assert npu.counts["npu::npu_grouped_matmul"] == 2


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("mode", ["eager", pytest.param("npugraph", marks=pytest.mark.slow)])
def test_experts_in_8_bits_give_the_tokens_of_the_ref_lane(mode: str, tmp_path: Path) -> None:
    """Made-up weights, of experts as wide as the operator wants them."""
    source = FAMILIES / "llada2" / "model_a"
    tree = {**json.loads((source / "config.json").read_text()), "n_group": 2, "moe_intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    decode = DecodeConfig.model_validate(CASES["llada2"][1])
    options = {"quantization": "w8a8", "load_format": "dummy"}
    found = decoded("npu", tmp_path, decode, mode, **options)[1]
    assert found == decoded("cpu", tmp_path, decode, **options)[1]
    assert len(found) == len(PROMPTS)


def test_norms_of_heads_at_published_sizes_are_accepted(npu: Any) -> None:
    """16 query and 4 KV heads."""
    qkv, angle = torch.zeros(64, 24 * 128).bfloat16().npu(), torch.zeros(64, 1, 128).bfloat16().npu()
    weight = torch.ones(128).bfloat16().npu()
    projections = npu_ops().split_and_rotate(qkv, angle, angle, 16, HeadNorms(weight, weight, 1e-6))
    assert projections.query.shape == (64, 16, 128) and projections.key.shape == (64, 4, 128)
    assert npu.counts["npu::npu_rms_norm"] == 2
