"""Weights that are no numbers are named by file and tensor, whichever tensor it is and wherever they come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_weights import load, random_tensors, save_sharded, write_config

from common.checkpoint.rules import checkpoint_shapes
from common.errors import ConfigError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_value_of_a_norm_or_a_bias_is_noticed(tmp_path: Path, value: float) -> None:
    config = write_config(tmp_path)
    for name in [name for name, shape in checkpoint_shapes(config).items() if len(shape) == 1]:
        tensors = random_tensors(config)
        tensors[name][-1] = value
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=rf"model\.safetensors: {name}: holds NaN or infinite values"):
            load(tmp_path, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_of_no_numbers_is_noticed_on_the_rank_that_has_it(tmp_path: Path, dtype: torch.dtype) -> None:
    config = write_config(tmp_path)
    for name in [name for name, shape in checkpoint_shapes(config).items() if len(shape) == 2]:
        tensors = random_tensors(config, dtype)
        tensors[name][:] = NAN
        save_sharded(tmp_path, tensors)
        for rank in range(2):
            with pytest.raises(ConfigError, match=rf"model-0000\d-of-00003\.safetensors: {name}: holds NaN"):
                load(tmp_path, config, rank, 2, dtype=torch.bfloat16)


def test_what_the_models_dtype_cannot_hold_names_the_dtype(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    tensors = random_tensors(config)
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight: holds values too large for float16; set dtype"):
        load(tmp_path, config, dtype=torch.float16)
    assert load(tmp_path, config, dtype=torch.bfloat16)["norm.weight"][0] > 9e5


def test_astronomic_numbers_are_numbers(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    tensors = random_tensors(config)
    tensors["model.norm.weight"][:] = 3e38
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.isfinite(load(tmp_path, config)["norm.weight"]).all()
