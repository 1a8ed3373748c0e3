"""Quantized models on the CPU: at load and from a folder they are one model; settings that clash are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.checkpoint import load_model_config, quantizable
from common.config import DeviceProfile, RunConfig
from common.decoding import Predictions
from common.errors import ConfigError
from common.runtime import synthetic_plan
from lopa_cuda.assemble import assemble
from quant.linear import QuantizedLinear
from quant.quantize import quantize_folder

MODEL = Path(__file__).parents[2] / "golden" / "model_a"


def predict(model: Path, quantization: str | None, *, quantize_lm_head: bool = False, **run: str) -> Predictions:
    profile = DeviceProfile(
        name="test", engine="lopa_cuda", device="cpu", dtype="float32", max_model_len=64,
        quantization=quantization, quantize_lm_head=quantize_lm_head,  # type: ignore[arg-type]
    )  # fmt: skip
    engine = assemble(profile, RunConfig(model=str(model), **run))  # type: ignore[arg-type]
    kinds = {type(module) for name, module in engine.model.named_modules() if name.endswith("_proj")}
    assert (kinds == {QuantizedLinear}) == (quantization is not None)
    assert isinstance(engine.model.lm_head, QuantizedLinear) == quantize_lm_head
    plan = synthetic_plan(load_model_config(MODEL), num_rows=2, width=12, num_cached=0, read_share=1.0)
    return engine.forward(plan)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "model"
    quantize_folder(MODEL, out, quantizable(load_model_config(MODEL)))
    return out


def test_a_quantized_folder_predicts_what_quantizing_at_load_does(folder: Path) -> None:
    from_folder, at_load = predict(folder, "w8a8"), predict(MODEL, "w8a8")
    assert np.array_equal(from_folder.token_T, at_load.token_T)
    np.testing.assert_allclose(from_folder.probability_T, at_load.probability_T, rtol=1e-5)


@pytest.mark.parametrize("quantization", ["w8a8", "fp8"])
def test_eight_bits_stay_close_to_the_float_model(quantization: str) -> None:
    plain, quantized = predict(MODEL, None), predict(MODEL, quantization)
    assert not np.array_equal(plain.probability_T, quantized.probability_T)
    assert np.median(np.abs(plain.probability_T - quantized.probability_T)) < 0.1


@pytest.mark.parametrize("quantization", ["w8a8", "fp8"])
def test_a_head_in_eight_bits_predicts_nearly_what_a_float_one_does(folder: Path, quantization: str) -> None:
    model = folder if quantization == "w8a8" else MODEL
    plain, quantized = (predict(model, quantization, quantize_lm_head=is_quantized) for is_quantized in (False, True))
    difference = np.abs(plain.probability_T - quantized.probability_T)
    assert 0 < np.median(difference) < 0.02
    assert np.mean(plain.token_T == quantized.token_T) > 0.8


def test_a_quantized_folder_under_another_quantization_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="add --set quantization=w8a8"):
        predict(folder, "fp8")
    with pytest.raises(ConfigError, match="add --set quantization=w8a8"):
        predict(folder, None)


def test_an_adapter_on_a_quantized_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="merge adapter first"):
        predict(folder, "w8a8", lora_path="adapter")
