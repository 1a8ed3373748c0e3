"""Weights on simulated devices: replaced under captured graphs, given back and taken again, they decode what a fresh
engine does."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.decoding import PutWeights, ReadWeights, ReleaseMemory, ResumeMemory, carry_out
from lopa_ascend.engine import AscendEngine
from tests.npu.test_npu_engine import FEW, MODEL, PROMPTS, causal, decode_all, engine_on
from tests.other_weights import write_other

pytestmark = pytest.mark.sim


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize(
    ("mode", "quantization"),
    [
        ("npugraph", "w8a8"),
        ("eager", None),
        pytest.param("npugraph", None, marks=pytest.mark.slow),
        pytest.param("torchair", "w8a8", marks=pytest.mark.slow),
        pytest.param("npugraph_ex", None, marks=pytest.mark.slow),
    ],
)
def test_replaced_weights_decode_what_a_fresh_engine_does(mode: str, quantization: str | None, tmp_path: Path) -> None:
    decode = causal(shift_row="fresh", max_new_tokens=16)
    other = write_other(tmp_path / "other", 10, MODEL)
    models = {"": MODEL, "other": other}

    def made(model: Path, cache: str) -> AscendEngine:
        return engine_on("npu", decode, quantization, mode, model, tmp_path / cache, FEW)

    def decoded(engine: AscendEngine) -> dict[str, tuple[int, ...]]:
        return decode_all(engine, decode, PROMPTS[1:])

    fresh = {name: decoded(made(model, f"cache{name}")) for name, model in models.items()}
    assert fresh[""] != fresh["other"]
    engine = made(MODEL, "cache")
    assert decoded(engine) == fresh[""]
    for name in ("other", "", "other"):
        num_captured = engine.layers.num_captured
        assert carry_out(engine, ReadWeights(str(models[name]))) is carry_out(engine, PutWeights()) is None
        assert (engine.layers.num_captured > 0) == (mode != "eager"), "captured anew, where weights are in FRACTAL_NZ"
        assert quantization is not None or engine.layers.num_captured == num_captured, "graphs stay elsewhere"
        assert decoded(engine) == fresh[name]
    assert carry_out(engine, ReleaseMemory()) is None
    held = [*engine.model.parameters(), *engine.model.buffers(), *engine.cache.tensors]
    assert not any(tensor.untyped_storage().nbytes() for tensor in held) and engine.layers.num_captured == 0
    assert carry_out(engine, ResumeMemory()) is None
    assert decoded(engine) == fresh["other"]
