"""Weights under captured graphs: what is replayed after they were replaced, or given back and taken again, is what a
fresh engine decodes."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_engine_cuda import CONFIG, EOS, MASK, PROMPTS

from common.checkpoint import load_model_config
from common.checkpoint.rules import checkpoint_shapes
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.config.profile import GraphConfig
from common.decoding import (
    Completion,
    GenerationRequest,
    PutWeights,
    ReadWeights,
    ReleaseMemory,
    ResumeMemory,
    Scheduler,
    carry_out,
    decode_requests,
)
from lopa_cuda.assemble import assemble
from lopa_cuda.engine import CudaEngine

pytestmark = pytest.mark.cuda

DECODE = DecodeConfig(num_lookahead=3, block_size=16, max_new_tokens=64, stop_at_eos=False)
FORMS: list[dict[str, Any]] = [{}, {"quantization": "w8a8", "quantize_lm_head": True}, {"quantization": "fp8"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp(f"model{seed}")
        (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        draw = torch.Generator().manual_seed(seed)
        weights = {
            name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=draw) / shape[-1] ** 0.5
            for name, shape in checkpoint_shapes(load_model_config(folder)).items()
        }
        save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors")
        folders.append(folder)
    return folders


def build(model: Path, **settings: Any) -> CudaEngine:
    profile = DeviceProfile(
        name="test", engine="lopa_cuda", device="cuda", max_model_len=1024, graph=GraphConfig(mode="cuda_graph"),
        **settings,
    )  # fmt: skip
    return assemble(profile, RunConfig(model=str(model), max_num_requests=2, decode=DECODE))


def decode(engine: CudaEngine) -> dict[str, tuple[int, ...]]:
    scheduler = Scheduler(DECODE, mask_token_id=MASK, eos_token_id=EOS, num_slots=engine.capacity.num_slots)
    requests = (GenerationRequest(str(number), prompt) for number, prompt in enumerate(PROMPTS))
    ended = [result for result in decode_requests(requests, scheduler, engine) if isinstance(result, Completion)]
    return {result.id: result.canvas_token_ids for result in ended}


def fresh(models: list[Path], settings: dict[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    found = [decode(build(model, **settings)) for model in models]
    assert found[0] != found[1]
    gc.collect()
    return found


@pytest.mark.parametrize("settings", FORMS, ids=str)
def test_captured_graphs_read_the_weights_that_replaced_others(models: list[Path], settings: dict[str, Any]) -> None:
    first, second = fresh(models, settings)
    engine = build(models[0], **settings)
    assert decode(engine) == first
    num_captured = engine.describe()["graphs"]
    on_device = {name: tensor.cuda() for name, tensor in load_file(models[0] / "model.safetensors").items()}
    for source, expected in ((str(models[1]), second), (on_device, first), (str(models[1]), second)):
        assert carry_out(engine, ReadWeights(source)) is carry_out(engine, PutWeights()) is None
        assert decode(engine) == expected
    assert engine.describe()["graphs"] == num_captured > 0


@pytest.mark.parametrize("settings", FORMS, ids=str)
def test_memory_is_given_back_and_taken_again(models: list[Path], settings: dict[str, Any]) -> None:
    first, second = fresh(models, settings)
    engine = build(models[0], **settings)
    assert decode(engine) == first
    gc.collect()
    full = torch.cuda.memory_allocated()
    weights = sum(tensor.untyped_storage().nbytes() for tensor in (*engine.model.parameters(), *engine.model.buffers()))
    cache = sum(tensor.nbytes for tensor in engine.cache.tensors)
    assert carry_out(engine, ReleaseMemory(("kv_cache",))) is None
    assert full - torch.cuda.memory_allocated() > 0.99 * cache
    assert carry_out(engine, ReleaseMemory(("weights",))) is None
    released = torch.cuda.memory_allocated()
    assert full - released > 0.99 * (cache + weights)
    assert carry_out(engine, ResumeMemory()) is None
    assert decode(engine) == first and engine.describe()["graphs"] > 0
    assert torch.cuda.memory_allocated() < full + 0.1 * (cache + weights)
    assert carry_out(engine, ReleaseMemory()) is None
    assert carry_out(engine, ReadWeights(str(models[1]))) is carry_out(engine, PutWeights()) is None
    assert carry_out(engine, ResumeMemory()) is None
    assert decode(engine) == second
    print(f"{settings}: {full >> 20} MiB allocated, {released >> 20} MiB while released")
