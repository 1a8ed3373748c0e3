"""Which tiles a device gets, what a start says about them, and which linears a model has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from common.checkpoint import fits_tensor_parallel, load_model_config
from common.config import DeviceProfile, RunConfig
from common.errors import ConfigError
from common.model import Decoder
from lopa_cuda.tiles import (
    Device,
    LinearConfig,
    LinearShape,
    ModelLinear,
    TileEntry,
    Tiles,
    TilesFile,
    load_tiles,
    model_linears,
    own_folder,
    save_tiles,
    tell,
)

ROOT = Path(__file__).parents[3]
MODELS = sorted(path.parent for path in (ROOT / "configs" / "models").glob("*/config.json"))
H200, H100 = Device("NVIDIA H200", "9.0"), Device("NVIDIA H100 80GB HBM3", "9.0")
SHAPE, OTHER = LinearShape("bf16", 64, 128, "none"), LinearShape("fp8", 128, 128, "swiglu")
NAMES = ("qkv", "o", "gate_up", "down", "shared_gate_up", "shared_down", "head")
A, B, C = (LinearConfig(64, 128, 1, stages) for stages in (2, 3, 4))


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    folder = tmp_path / "committed"
    save(folder, Device("Other GPU", "8.0"), {SHAPE: ((32, C),)})
    save(folder, H200, {SHAPE: ((32, A), (64, A)), OTHER: ((32, A),)})
    save(folder, Device("NVIDIA Z", "9.0"), {SHAPE: ((32, C),)})
    return folder


def save(folder: Path, device: Device, tables: dict[LinearShape, Tiles]) -> Path:
    entries = {shape: TileEntry(tiles, "2.11.0", "3.6.0") for shape, tiles in tables.items()}
    path = folder / device.file_name
    save_tiles(path, TilesFile(device.name, device.compute_capability, entries))
    return path


def test_a_file_is_named_by_its_device() -> None:
    assert (H200.file_name, H100.file_name) == ("nvidia_h200.json", "nvidia_h100_80gb_hbm3.json")


def test_a_device_gets_its_own_committed_file_and_what_it_lacks_of_another(committed: Path, tmp_path: Path) -> None:
    found = load_tiles(Device("NVIDIA Z", "9.0"), committed, tmp_path / "none")
    assert found.table == {SHAPE: ((32, C), (64, A)), OTHER: ((32, A),)}
    assert found.files == (committed / "nvidia_h200.json", committed / "nvidia_z.json")


def test_a_file_that_adds_nothing_to_the_devices_own_is_not_named(committed: Path, tmp_path: Path) -> None:
    assert load_tiles(H200, committed, tmp_path / "none").files == (committed / "nvidia_h200.json",)


def test_a_device_without_one_gets_that_of_its_compute_capability(committed: Path, tmp_path: Path) -> None:
    found = load_tiles(H100, committed, tmp_path / "none")
    assert found.files == (committed / "nvidia_h200.json",)
    assert found.table[OTHER] == ((32, A),)


def test_of_several_files_the_one_with_the_likest_name_comes_first(committed: Path, tmp_path: Path) -> None:
    save(committed, Device("NVIDIA A", "9.0"), {SHAPE: ((32, B),)})
    found = load_tiles(Device("NVIDIA H200 NVL", "9.0"), committed, tmp_path / "none")
    assert found.table[SHAPE] == ((32, A), (64, A)) and found.files == (committed / "nvidia_h200.json",)


def test_a_device_of_another_capability_gets_none(committed: Path, tmp_path: Path) -> None:
    assert load_tiles(Device("NVIDIA B200", "10.0"), committed, tmp_path / "none").table == {}


def test_what_the_user_measured_wins_limit_by_limit(committed: Path, tmp_path: Path) -> None:
    own = save(tmp_path / "own", H200, {SHAPE: ((16, B), (64, None), (128, B))})
    found = load_tiles(H200, committed, own.parent)
    assert found.table[SHAPE] == ((16, B), (32, A), (64, None), (128, B))
    assert found.table[OTHER] == ((32, A),)
    assert found.files == (committed / "nvidia_h200.json", own)


def test_the_user_has_tiles_for_this_very_device_only(committed: Path, tmp_path: Path) -> None:
    own = save(tmp_path / "own", H200, {SHAPE: ((32, B),)})
    assert load_tiles(H100, committed, own.parent).table[SHAPE] == ((32, A), (64, A))


def test_a_wrong_file_of_the_user_is_refused(committed: Path, tmp_path: Path) -> None:
    (tmp_path / H200.file_name).write_text("{}")
    with pytest.raises(ConfigError, match=r"nvidia_h200.json: device: this key is missing.*lopa tune MODEL"):
        load_tiles(H200, committed, tmp_path)


def test_the_committed_tiles_of_hopper_serve_every_hopper(tmp_path: Path) -> None:
    """A linear that one of them has, all have, be it by other tiles."""
    other = Device("NVIDIA Z", "9.0")
    shapes = [set(load_tiles(device, own=tmp_path).table) for device in (H200, H100, other)]
    assert shapes[0] == shapes[1] == shapes[2] != set()


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"LOPA_TILES": "mine", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "mine"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/lopa/tiles"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/lopa/tiles"),
        ({"HOME": "/h"}, "/h/.cache/lopa/tiles"),
        ({}, "/.cache/lopa/tiles"),
    ],
)
def test_where_the_users_tiles_lie(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str) -> None:
    for name in ("LOPA_TILES", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert own_folder() == Path(folder)


def test_a_start_names_the_files_and_the_linears_without_an_entry(committed: Path, tmp_path: Path) -> None:
    linears = [ModelLinear("qkv", SHAPE), ModelLinear("gate_up", OTHER)]
    tiles = load_tiles(H200, committed, tmp_path / "none")
    assert tell(H200, tiles, linears) == f"linear tiles of NVIDIA H200: {committed}/nvidia_h200.json"
    (committed / "nvidia_h200.json").unlink()
    tiles = load_tiles(Device("NVIDIA Z", "9.0"), committed, tmp_path / "none")
    assert tell(H200, tiles, linears).endswith(
        "nvidia_z.json; on the library for want of an entry: gate_up fp8 128x128 swiglu "
        "(`lopa tune MODEL` measures them)"
    )
    nothing = load_tiles(Device("NVIDIA B200", "10.0"), committed, tmp_path / "none")
    assert tell(Device("NVIDIA B200", "10.0"), nothing, linears).startswith(
        "linear tiles of NVIDIA B200: no file; on the library for want of an entry: qkv bf16 64x128, gate_up"
    )


@pytest.mark.slow
@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_linears_are_those_of_the_model(cuda: DeviceProfile, folder: Path, tp_size: int) -> None:
    config = load_model_config(folder)
    if not fits_tensor_parallel(config, tp_size):
        pytest.skip("this model cannot be cut so")
    run = RunConfig(model=str(folder), load_format="dummy")
    told = {(linear.name, *linear.shape[1:3]) for linear in model_linears(cuda, run, config, tp_size, tp_size - 1)}
    with torch.device("meta"):
        model = Decoder(config, cast(Any, None), tp_rank=tp_size - 1, tp_size=tp_size)
    held = {
        (name, *module.weight.shape)
        for path, module in model.named_modules()
        if (name := path.rpartition(".")[2].removeprefix("lm_").removesuffix("_proj")) in NAMES
    }
    assert told <= held
    assert {shape[1:] for shape in told} == {shape[1:] for shape in held}, "a shape is told once"


@pytest.fixture
def cuda() -> DeviceProfile:
    return DeviceProfile(name="test", engine="lopa_cuda", device="cuda")


@pytest.mark.parametrize(("quantization", "kind"), [(None, "bf16"), ("fp8", "fp8"), ("w8a8", "int8")])
def test_linears_are_of_the_profiles_kind_and_the_head_is_not(
    cuda: DeviceProfile, quantization: str | None, kind: str
) -> None:
    run = RunConfig(model=str(ROOT / "configs/models/dream_7b"), load_format="dummy")
    profile = cuda.model_copy(update={"quantization": quantization})
    *layer, head = model_linears(profile, run, load_model_config(run.model), 1)
    assert [linear.name for linear in layer] == ["qkv", "o", "gate_up", "down"]
    assert {linear.shape.kind for linear in layer} == {kind}
    assert [linear.shape.fusion for linear in layer] == ["none", "none", "swiglu", "none"]
    assert head == ModelLinear("head", LinearShape("bf16", 152064, 3584, "none"))


@pytest.mark.parametrize(("quantization", "kind"), [("fp8", "fp8"), ("w8a8", "int8")])
def test_a_quantized_head_is_of_the_profiles_kind(cuda: DeviceProfile, quantization: str, kind: str) -> None:
    run = RunConfig(model=str(ROOT / "configs/models/dream_7b"), load_format="dummy")
    profile = cuda.model_copy(update={"quantization": quantization, "quantize_lm_head": True})
    *_, head = model_linears(profile, run, load_model_config(run.model), 2)
    assert head.shape == (kind, 152064 // 2, 3584, "none")


def test_mixtures_have_the_linears_of_their_shared_experts(cuda: DeviceProfile) -> None:
    run = RunConfig(model=str(ROOT / "configs/models/llada2_mini"), load_format="dummy")
    names = [linear.name for linear in model_linears(cuda, run, load_model_config(run.model), 1)]
    assert {"shared_gate_up", "shared_down"} <= {*names}
