"""The shapes that `lopa bench kernels` times are Dream-7B's."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")
from common.checkpoint import load_model_config
from common.config import DeviceProfile, RunConfig
from lopa_cuda.bench.inputs import KINDS
from lopa_cuda.bench.linears import SIZES, linears_of
from lopa_cuda.tiles import Kind, model_linears
from lopa_cuda.tuning.pair import LayerSizes

MODEL = Path(__file__).parents[3] / "configs" / "models" / "dream_7b"


@pytest.mark.parametrize(("kind", "quantization"), list(zip(KINDS, (None, "w8a8", "fp8"), strict=True)))
def test_the_linears_are_those_of_the_model(kind: Kind, quantization: str | None) -> None:
    config = load_model_config(MODEL)
    profile = DeviceProfile(name="test", engine="lopa_cuda", device="cuda", quantization=quantization)
    linears = model_linears(profile, RunConfig(model=str(MODEL), load_format="dummy"), config, 1)
    assert tuple(linears_of([kind])) == (linears if kind == "bf16" else linears[:-1])
    assert LayerSizes.of(config, 1) == SIZES
