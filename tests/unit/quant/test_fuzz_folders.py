"""Whatever a quantized folder holds: it is read, or refused in one line, soon and without much memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from fuzzing import bounded, fuzzed, restored
from hypothesis import given
from hypothesis import strategies as st
from nonsense import damaged_bytes, damaged_safetensors, damaged_tree, to_bytes
from safetensors.torch import load, save
from test_quant_folders import CONFIG, Decoder, float_tensors, floats_of, inputs, quantize, write_model
from test_quant_folders import load as load_share

from common.errors import ConfigError
from quant.calibration import calibrate
from quant.errors import QuantizationError
from quant.layout import is_quantized_folder

SCHEMES = ("w8a8_dynamic", "w8a8")
DESCRIPTION, INDEX = "quant_model_description.json", "model.safetensors.index.json"
Files = dict[str, bytes]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """The files of a float folder and of one of each scheme, of the same model."""
    root = tmp_path_factory.mktemp("folders")
    model = write_model(root / "float", float_tensors())
    decoder = Decoder({name: tensor.float() for name, tensor in float_tensors().items()})
    calibration = calibrate(decoder, [lambda: decoder(inputs())])
    for scheme in SCHEMES:
        quantize(model, root / scheme, scheme, calibration, max_shard_bytes=20_000)  # type: ignore[arg-type]
    return {path.name: {file.name: file.read_bytes() for file in path.iterdir()} for path in root.iterdir()}


def read_all(folder: Path) -> None:
    assert isinstance(is_quantized_folder(folder), bool)
    for rank in range(2):
        for name, tensor in load_share(folder, rank, 2).items():
            assert tensor.is_contiguous(), name
            assert not tensor.is_floating_point() or torch.isfinite(tensor).all(), name
    source = floats_of(folder)
    for name in source.names():
        assert tuple(source.read(name).shape) == source.shape(name)


def reads_or_refuses(folder: Path) -> None:
    try:
        with bounded():
            read_all(folder)
    except (QuantizationError, ConfigError) as error:
        assert str(error).isprintable() and 0 < len(str(error)) < 2000, str(error)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_whole_folder_is_read(folders: dict[str, Files], scheme: str, tmp_path: Path) -> None:
    read_all(restored(tmp_path / "model", folders[scheme]))


@fuzzed
@given(scheme=st.sampled_from(SCHEMES), name=st.sampled_from((DESCRIPTION, INDEX, "config.json")), data=st.data())
def test_trees(folders: dict[str, Files], tmp_path: Path, scheme: str, name: str, data: st.DataObject) -> None:
    folder = restored(tmp_path / "model", folders[scheme])
    (folder / name).write_bytes(to_bytes(data.draw(damaged_tree(json.loads(folders[scheme][name])))))
    reads_or_refuses(folder)


@fuzzed
@given(scheme=st.sampled_from(SCHEMES), data=st.data())
def test_bytes_of_any_file(folders: dict[str, Files], tmp_path: Path, scheme: str, data: st.DataObject) -> None:
    folder = restored(tmp_path / "model", folders[scheme])
    name = data.draw(st.sampled_from(sorted(folders[scheme])))
    (folder / name).write_bytes(data.draw(damaged_bytes(folders[scheme][name])))
    reads_or_refuses(folder)


@fuzzed
@given(scheme=st.sampled_from(SCHEMES), data=st.data())
def test_safetensors(folders: dict[str, Files], tmp_path: Path, scheme: str, data: st.DataObject) -> None:
    folder = restored(tmp_path / "model", folders[scheme])
    name = data.draw(st.sampled_from([name for name in sorted(folders[scheme]) if name.endswith(".safetensors")]))
    (folder / name).write_bytes(data.draw(damaged_safetensors(folders[scheme][name])))
    reads_or_refuses(folder)


@fuzzed
@given(scheme=st.sampled_from(SCHEMES), data=st.data())
def test_tensors(folders: dict[str, Files], tmp_path: Path, scheme: str, data: st.DataObject) -> None:
    folder = restored(tmp_path / "model", folders[scheme])
    file = data.draw(st.sampled_from([name for name in sorted(folders[scheme]) if name.endswith(".safetensors")]))
    tensors = load(folders[scheme][file])
    name = data.draw(st.sampled_from(sorted(tensors)))
    tensors[name] = data.draw(damaged_tensors(tensors[name]))
    (folder / file).write_bytes(save(tensors))
    reads_or_refuses(folder)


@st.composite
def damaged_tensors(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    dtypes = (torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.float64, torch.float8_e4m3fn)
    match draw(st.sampled_from(("dtype", "value", "shape", "scaled"))):
        case "dtype":
            return tensor.to(draw(st.sampled_from(dtypes)))
        case "value" if tensor.is_floating_point():
            tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = draw(st.floats(width=32))
            return tensor
        case "scaled" if tensor.is_floating_point():
            return tensor * draw(st.floats(width=32))
        case _:
            return torch.zeros(draw(st.lists(st.integers(0, 40), max_size=4)), dtype=tensor.dtype)


@fuzzed
@given(data=st.data())
def test_float_folders(folders: dict[str, Files], tmp_path: Path, data: st.DataObject) -> None:
    """Quantizing takes them and writes a whole folder, or nothing."""
    model, out = restored(tmp_path / "model", folders["float"]), tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    match data.draw(st.sampled_from(("config", "bytes", "safetensors"))):
        case "config":
            name, damaged = "config.json", to_bytes(data.draw(damaged_tree(CONFIG)))
        case "bytes":
            name = data.draw(st.sampled_from(["config.json", "model.safetensors"]))
            damaged = data.draw(damaged_bytes(folders["float"][name]))
        case _:
            name = "model.safetensors"
            damaged = data.draw(damaged_safetensors(folders["float"][name]))
    (model / name).write_bytes(damaged)
    try:
        with bounded():
            quantize(model, out)
    except (QuantizationError, ConfigError) as error:
        assert str(error).isprintable() and 0 < len(str(error)) < 2000, str(error)
        assert not out.exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
