"""Tests of quantizing a float folder: LoRA, smoothing, exclusions, the report, and nothing half written."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_quant_folders import (
    HEAD_SIZE,
    HIDDEN,
    KV,
    NUM_KV_HEADS,
    NUM_LAYERS,
    Decoder,
    Q,
    edit_json,
    edit_tensors,
    float_tensors,
    floats_of,
    inputs,
    layout_of,
    load,
    quantize,
    write_model,
)  # fmt: skip
from torch import Tensor

from quant import quantize as module
from quant.calibration import Calibration, calibrate, smooth_layer
from quant.calibration.smooth import smoothing_scale
from quant.errors import QuantizationError
from quant.layout import is_quantized_folder
from quant.linear import install_linears
from quant.quantize import quantize_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", float_tensors())


def calibration(num_samples: int = 0) -> Calibration:
    decoder = Decoder({name: tensor.float() for name, tensor in float_tensors().items()})
    runs = [lambda seed=seed: decoder(inputs(seed=seed)) for seed in range(3)]
    return calibrate(decoder, runs, num_samples)


def quantized_decoder(folder: Path) -> Decoder:
    """The folder as it runs: float parts from the folder, linears replaced by its quantized ones."""
    source = floats_of(folder)
    tensors = {name: tensor.float() for name, tensor in float_tensors().items()}
    decoder = Decoder(tensors | {name: source.read(name).float() for name in source.names()})
    install_linears(decoder, load(folder), torch.float32)
    return decoder


def error_of(folder: Path) -> float:
    """Return the error on inputs that were calibrated: static ranges clip what lies beyond."""
    exact = Decoder({name: tensor.float() for name, tensor in float_tensors().items()})(inputs(seed=1))
    return ((quantized_decoder(folder)(inputs(seed=1)) - exact).norm() / exact.norm()).item()


def test_smoothing_leaves_the_float_model_exactly_as_it_was(model: Path) -> None:
    tensors, layout = float_tensors(), layout_of(model)
    exact = Decoder(tensors)(inputs().bfloat16())
    smoothed = dict(tensors)
    own = calibration()
    for layer in range(NUM_LAYERS):
        linears = [linear for linear in layout.linears if linear.layer == layer]
        ranges = smooth_layer(smoothed, linears, own, layout, 0.5)
        for linear in linears:
            assert ranges[linear].absmax.max() < own.of(str(linear)).absmax.max()
    changed = {name for name in tensors if not torch.equal(tensors[name], smoothed[name])}
    assert changed >= {name for name in tensors if "layers" in name and name.endswith("weight")}
    assert torch.equal(Decoder(smoothed)(inputs().bfloat16()), exact)


def test_query_heads_of_a_group_share_the_scales_of_v(model: Path) -> None:
    tensors = float_tensors()
    before = tensors["model.layers.0.self_attn.o_proj.weight"].float()
    v_before = tensors["model.layers.0.self_attn.v_proj.weight"].float()
    layout = layout_of(model)
    o_proj = next(linear for linear in layout.linears if linear.kind == "o_proj")
    smooth_layer(tensors, [o_proj], calibration(), layout, 0.5)
    scale = (tensors["model.layers.0.self_attn.o_proj.weight"].float() / before)[0].reshape(NUM_KV_HEADS, -1, HEAD_SIZE)
    assert torch.equal(scale, scale[:, :1].expand_as(scale)) and scale.unique().numel() > 1
    v_scale = v_before / tensors["model.layers.0.self_attn.v_proj.weight"].float()
    assert torch.equal(v_scale, scale[:, 0].reshape(KV, 1).expand_as(v_scale))


def test_smoothing_scales_are_bounded_powers_of_two() -> None:
    scale = smoothing_scale(torch.tensor([0.0, 1.0, 1e9, 4.0]), torch.tensor([1.0, 0.0, 1e-9, 1.0]), 0.5)
    assert scale.tolist() == [1.0, 1.0, 256.0, 2.0]


@pytest.mark.parametrize("scheme", ["w8a8_dynamic", "w8a8"])
def test_smoothing_helps_where_activations_have_outliers(tmp_path: Path, model: Path, scheme: str) -> None:
    own = calibration(num_samples=32)
    plain = quantize(model, tmp_path / "plain", scheme, own)  # type: ignore[arg-type]
    smooth = quantize(model, tmp_path / "smooth", scheme, own, smooth_alpha=0.5)  # type: ignore[arg-type]
    outlier_facing = [linear.name for linear in plain.linears if "q_proj" in linear.name or "gate" in linear.name]
    errors = [{linear.name: linear.output_error or 1 for linear in report.linears} for report in (plain, smooth)]
    assert all(errors[1][name] < errors[0][name] for name in outlier_facing)
    assert error_of(tmp_path / "smooth") < error_of(tmp_path / "plain") < 0.05


def test_the_report_states_every_linear(tmp_path: Path, model: Path) -> None:
    report = quantize(model, tmp_path / "out", calibration=calibration(num_samples=16))
    assert len(report.linears) == 7 * NUM_LAYERS and report.scheme == "w8a8_dynamic"
    assert all(0.001 < linear.weight_error < 0.02 for linear in report.linears)
    assert all(linear.output_error and 0.001 < linear.output_error < 0.03 for linear in report.linears)
    assert report.bytes_after < report.bytes_before
    assert report.as_dict()["linears"][2]["shape"] == (KV, HIDDEN)
    assert error_of(tmp_path / "out") < 0.03


def test_excluded_linears_stay_as_they_were(tmp_path: Path, model: Path) -> None:
    exclude = ["layers.0.*", "model.layers.1.self_attn.k_proj"]
    report = quantize(model, tmp_path / "out", exclude=exclude)
    assert {linear.name.split(".", 3)[3] for linear in report.linears} == {
        "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    }  # fmt: skip
    source, original = floats_of(tmp_path / "out"), float_tensors()
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.bias"):
        assert torch.equal(source.read(name), original[name])
    assert not any("qkv" in name for name in load(tmp_path / "out"))


def test_lora_is_merged_before_quantization(tmp_path: Path, model: Path) -> None:
    def double_queries(name: str, tensor: Tensor) -> Tensor:
        return tensor.float() * 2 if name.endswith("q_proj.weight") else tensor

    quantize(model, tmp_path / "plain", exclude=["layers.1.qkv_proj"])
    quantize(model, tmp_path / "merged", exclude=["layers.1.qkv_proj"], lora=double_queries)
    name = "layers.0.qkv_proj.weight_scale"
    plain, merged = load(tmp_path / "plain")[name], load(tmp_path / "merged")[name]
    assert torch.equal(merged, plain * torch.cat([torch.full((Q,), 2.0), torch.ones(2 * KV)]))
    excluded = "model.layers.1.self_attn.q_proj.weight"
    kept = floats_of(tmp_path / "merged").read(excluded)
    assert kept.dtype == torch.bfloat16 and torch.equal(kept, float_tensors()[excluded] * 2)


def test_a_failure_leaves_nothing_behind(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_description", killed)
    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_killed_run_leaves_no_folder_of_that_name(tmp_path: Path, model: Path) -> None:
    code = (
        "import os, signal, sys; from quant import quantize\n"
        "quantize.write_description = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from common.checkpoint import load_model_config, quantizable\n"
        "quantize.quantize_folder(sys.argv[1], sys.argv[2], quantizable(load_model_config(sys.argv[1])))"
    )
    root = Path(module.__file__).parents[1]
    killed = subprocess.run([sys.executable, "-c", code, model, tmp_path / "out"], cwd=root, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = [path.name for path in tmp_path.iterdir() if path != model]
    assert len(left) == 1 and left[0].startswith(".out.partial-")
    assert not is_quantized_folder(tmp_path / left[0])
    quantize(model, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert not any(path.name.startswith(".") for path in (tmp_path / "out").iterdir())


def test_an_error_while_writing_names_the_folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module, "write_description", full)
    with pytest.raises(QuantizationError, match="out: could not be written"):
        quantize(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"scheme": "w4a8"}, "scheme 'w4a8' is not known"),
        ({"scheme": "w8a8"}, "scheme 'w8a8' needs a calibration"),
        ({"smooth_alpha": 0.5}, "smooth_alpha needs a calibration"),
        ({"smooth_alpha": 1.5}, "smooth_alpha 1.5 is not in 0..1"),
        ({"exclude": ["layers.9.*"]}, r"'layers\.9\.\*' names no linear"),
        ({"exclude": ["*"]}, "leaves no linear"),
        ({"scheme": "w8a8", "calibration": Calibration({})}, r"layers\.0\.qkv_proj was not calibrated"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, model: Path, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(QuantizationError, match=message):
        quantize(model, tmp_path / "out", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_folders_that_do_not_fit_are_refused(tmp_path: Path, model: Path) -> None:
    quantize(model, tmp_path / "out")
    with pytest.raises(QuantizationError, match="exists and is not empty"):
        quantize(model, tmp_path / "out")
    with pytest.raises(QuantizationError, match="already quantized"):
        quantize(tmp_path / "out", tmp_path / "again")
    with pytest.raises(QuantizationError, match="no such folder"):
        quantize_folder(tmp_path / "gone", tmp_path / "again", layout_of(model))
    edit_json(model / "config.json", lambda tree: tree.update(num_hidden_layers=1))
    with pytest.raises(QuantizationError, match="layer 1 is in the files"):
        quantize(model, tmp_path / "again")
    edit_json(model / "config.json", lambda tree: tree.update(num_hidden_layers=3))
    with pytest.raises(QuantizationError, match=r"'model\.layers\.2\.self_attn\.q_proj\.weight' is in no file"):
        quantize(model, tmp_path / "again")
    edit_tensors(model, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.ones(3, 3)}))
    with pytest.raises(QuantizationError, match=r"up_proj\.weight' is \[3, 3\], but config\.json makes it \[48, 32\]"):
        quantize(model, tmp_path / "again")


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_a_model_of_no_numbers_is_refused_by_tensor(tmp_path: Path, model: Path, name: str) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[5] = torch.nan

    edit_tensors(model, damage)
    with pytest.raises(QuantizationError, match=rf"model\.safetensors: {name}: holds NaN or infinite values"):
        quantize(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_empty_folder_may_be_filled(tmp_path: Path, model: Path) -> None:
    (tmp_path / "out").mkdir()
    quantize(model, tmp_path / "out")
    shard = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    save_file(shard, tmp_path / "copy.safetensors")
    assert shard["model.layers.0.self_attn.q_proj.weight"].dtype == torch.int8
