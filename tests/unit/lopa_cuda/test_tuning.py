"""The search for tiles: what it proposes, what it keeps, where it goes on, and what it refuses."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import started
import torch

from common.checkpoint import load_model_config
from common.config import DeviceProfile, MeshConfig, RunConfig, tiles_folder
from common.errors import ConfigError, MissingCapability
from common.platforms import TuneOptions, platform_of
from lopa_cuda import assemble
from lopa_cuda.tiles import (
    Device,
    LinearConfig,
    LinearShape,
    ModelLinear,
    WideConfig,
    find_config,
    impossible,
    install_tiles,
    model_linears,
    read_tiles,
)
from lopa_cuda.tuning import run as tuning
from lopa_cuda.tuning import tune_model
from lopa_cuda.tuning.candidates import (
    MOST_CANDIDATES,
    MOST_CUT_CANDIDATES,
    MOST_MANY_CANDIDATES,
    MOST_WIDE_CANDIDATES,
    candidates,
    distinct,
    wide_candidates,
)
from lopa_cuda.tuning.run import OwnTiles, Versions, remaining, search_all, tiles_to_time
from lopa_cuda.tuning.search import NUM_ROUNDS, ROUND_REPLAYS, Choice, choose

ROOT = Path(__file__).parents[3]
H200 = Device("NVIDIA H200", "9.0")
NOW, EARLIER = Versions("2.11.0", "3.6.0"), Versions("2.10.0", "3.5.0")
QKV = ModelLinear("qkv", LinearShape("bf16", 4608, 3584, "none"))
HEAD = ModelLinear("head", LinearShape("bf16", 152064, 3584, "none"))
A, B, C = (LinearConfig(64, 128, 1, stages) for stages in (2, 3, 4))


@pytest.fixture
def cuda() -> DeviceProfile:
    return DeviceProfile(name="gpu", engine="lopa_cuda", device="cuda")


@pytest.fixture
def dream() -> RunConfig:
    return RunConfig(model=str(ROOT / "configs/models/dream_7b"), load_format="dummy")


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "fp8", "w8a8"])
@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("model", ["dream_7b", "llada_8b", "fast_dllm_v2_1_5b", "llada2_mini"])
def test_every_proposed_tile_can_run(cuda: DeviceProfile, model: str, tp_size: int, quantization: str | None) -> None:
    run = RunConfig(model=str(ROOT / "configs" / "models" / model), load_format="dummy")
    profile = cuda.model_copy(update={"quantization": quantization})
    config = load_model_config(run.model)
    for linear in model_linears(profile, run, config, min(tp_size, config.num_kv_heads)):
        for num_tokens in (1, 16, 64, 128, 192, 320, 400, 32768):
            found = candidates(linear.shape, num_tokens, multiprocessors=132)
            wide = [tile for tile in found if isinstance(tile, WideConfig)]
            assert bool(wide) == (num_tokens > 64 and (num_tokens <= 320 or linear.shape.kind != "bf16"))
            assert sum(tile.tokens == 0 for tile in wide) <= MOST_WIDE_CANDIDATES
            most_cut = MOST_CUT_CANDIDATES if num_tokens <= 320 else MOST_MANY_CANDIDATES
            assert sum(tile.tokens > 0 for tile in wide) <= most_cut
            assert num_tokens > 320 or found
            assert len(found) <= MOST_CANDIDATES + len(wide) and len(set(found)) == len(found)
            assert not any(impossible(linear.shape, tile, num_tokens) for tile in found)
            narrow_of(linear.shape, num_tokens)


def narrow_of(shape: LinearShape, num_tokens: int) -> list[LinearConfig]:
    """Where the device does not run the wide kernel there is something to time all the same."""
    found = candidates(shape, num_tokens, multiprocessors=132, has_wide=False)
    narrow = [tile for tile in found if isinstance(tile, LinearConfig)]
    assert narrow and narrow == found
    return narrow


def test_what_was_found_by_hand_is_among_the_proposals() -> None:
    """All but stages and warps are, which depend on little."""
    entries = read_tiles(tiles_folder() / "nvidia_h200.json").entries
    known = [(shape, most, tile) for shape, entry in entries.items() for most, tile in entry.tiles if tile]
    usual: dict[str, Any] = {"stages": 0, "warps": 0, "early": False}
    found = [
        tile._replace(**usual) in {other._replace(**usual) for other in narrow_of(shape, most)}
        for shape, most, tile in known
        if isinstance(tile, LinearConfig)
    ]
    assert len(found) > 100 and sum(found) > 0.95 * len(found)


def test_what_was_fastest_for_many_tokens_is_among_the_proposals() -> None:
    """The H200's tiles of 8-bit linears, each of which was measured against others."""
    entries = read_tiles(tiles_folder() / "nvidia_h200.json").entries
    many = [
        (shape, most, tile)
        for shape, entry in entries.items()
        for most, tile in entry.tiles
        if isinstance(tile, WideConfig) and 320 < most <= 2112  # the last ones were found at 4,096
    ]
    assert len(many) > 30 and all(tile in wide_candidates(shape, most, 132) for shape, most, tile in many)


def test_a_wide_tile_divides_evenly_over_the_multiprocessors() -> None:
    """What was fastest on an H200 is proposed first: gate and up in two tiles a multiprocessor."""
    gate_up = LinearShape("bf16", 37888, 3584, "swiglu")
    assert wide_candidates(gate_up, 192, 132)[0] == WideConfig(144)
    assert -(-37888 // 144) == 2 * 132


def test_numbers_of_tokens_of_one_tile_are_compiled_once() -> None:
    cases = [(QKV.shape, count, A) for count in (1, 16, 32, 33, 48, 64, 128, 192)]
    assert [count for _, count, _ in distinct(cases)] == [1, 16, 32, 33, 48, 128]
    wide = [(QKV.shape, count, WideConfig(96)) for count in (65, 128, 129, 160, 192)]
    assert [count for _, count, _ in distinct(wide)] == [65, 129], "the first of those that are one kernel"


class Clock:
    """Times by tile, one after another where there are several; counts who was asked."""

    def __init__(self, us_of: dict[LinearConfig | None, float | tuple[float, ...] | None]) -> None:
        self._us_of, self.asked = us_of, list[tuple[LinearConfig | None, int]]()

    def __call__(self, tile: LinearConfig | None, replays: int) -> float | None:
        place = sum(other == tile for other, count in self.asked if count == replays)
        self.asked.append((tile, replays))
        us = self._us_of[tile]
        return us[place % len(us)] if isinstance(us, tuple) else us


def right(_: LinearConfig) -> bool:
    return True


def test_the_fastest_tile_is_kept_where_it_beats_the_library() -> None:
    clock = Clock({None: 10.0, A: 9.5, B: 9.0, C: 12.0})
    choice = choose([A, B, C], 64, clock, right)
    assert choice == Choice(64, B, 10.0, B, 9.0)
    assert str(choice) == "64 tokens: tile 64x128, 3 stages 9.0 us, library 10.0 us, 1.11 x"
    rounds = [tile for tile, replays in clock.asked if replays == ROUND_REPLAYS]
    assert rounds == [None, B, A, C] * NUM_ROUNDS, "in turn"


@pytest.mark.parametrize(
    ("library", "tile"),
    [(10.0, 10.5), (10.0, 9.96), ((9.0, 10.0, 10.0), (9.1, 9.1, 9.1)), ((10.0, 10.0, 10.0), (9.0, 9.0, 10.1))],
    ids=["slower", "within the noise", "one round of the library is faster", "one round of the tile is slower"],
)
def test_the_library_is_kept_where_a_tile_is_not_surely_faster(library: Any, tile: Any) -> None:
    choice = choose([A], 64, Clock({None: library, A: tile}), right)
    assert choice.config is None and choice.best == A
    assert str(choice).endswith(": the library is kept")


def test_a_tile_that_the_device_does_not_take_is_left_out() -> None:
    assert choose([A, B], 64, Clock({None: 10.0, A: None, B: 5.0}), right).config == B
    choice = choose([A], 64, Clock({None: 10.0, A: None}), right)
    assert choice == Choice(64, None, 10.0, None, 10.0)
    assert str(choice) == "64 tokens: library 10.0 us, no tile fits this device"
    assert str(choose([], 64, Clock({None: 10.0}), right)) == "64 tokens: library 10.0 us, no tile to try"


def test_a_tile_that_computes_something_else_is_no_choice() -> None:
    assert choose([A, B], 64, Clock({None: 10.0, A: 1.0, B: 5.0}), lambda tile: tile != A).config == B


def test_a_line_says_what_is_unusual_of_a_tile() -> None:
    tile = LinearConfig(128, 64, 1, 4, warps=8, swap=True, tail=16)
    assert "tile 128x64, 4 stages, warps 8, swap, tail 16 9.0 us" in str(Choice(64, tile, 10.0, tile, 9.0))
    assert "tile 128x64 in 3 parts, 4 stages 9.0 us" in str(Choice(64, None, 10.0, LinearConfig(128, 64, 3, 4), 9.0))


def test_the_tile_in_use_is_timed_too() -> None:
    current = LinearConfig(128, 128, 3, 4, early=True)
    in_use = {QKV.shape: ((32, A), (64, current))}
    timed = tiles_to_time({QKV: [16, 64, 128]}, 132, in_use)
    assert timed[QKV, 16][0] == A and timed[QKV, 64][0] == current
    assert timed[QKV, 128] == candidates(QKV.shape, 128, 132)


def choices(linear: ModelLinear, tiles: dict[int, list[LinearConfig]]) -> Iterator[Choice]:
    for count in tiles:
        yield Choice(count, A if count < 64 else None, 10.0, A, 9.0)


def test_entries_are_written_linear_by_linear_and_a_search_goes_on_behind_them(tmp_path: Path) -> None:
    path, options = tmp_path / "tiles" / H200.file_name, TuneOptions((32, 64))
    own = OwnTiles(path, H200, NOW)

    def stopped(linear: ModelLinear, tiles: dict[int, list[LinearConfig]]) -> Iterator[Choice]:
        if linear == HEAD:
            raise KeyboardInterrupt
        yield from choices(linear, tiles)

    left = remaining(own, (QKV, HEAD), options)
    assert left == {QKV: [32, 64], HEAD: [32, 64]}
    with pytest.raises(KeyboardInterrupt):
        list(search_all(own, tiles_to_time(left, 132, {}), stopped))
    assert dict(read_tiles(path).entries) == {QKV.shape: entry_of(((32, A), (64, None)))}
    left = remaining(OwnTiles(path, H200, NOW), (QKV, HEAD), options)
    assert left == {HEAD: [32, 64]}
    lines = list(search_all(own, tiles_to_time(left, 132, {}), choices))
    assert [line.split(":")[0] for line in lines] == [f"head bf16 152064x3584, {count} tokens" for count in (32, 64)]
    assert read_tiles(path).entries.keys() == {QKV.shape, HEAD.shape}
    assert remaining(own, (QKV, HEAD), options._replace(is_overwriting=True)) == {QKV: [32, 64], HEAD: [32, 64]}
    assert remaining(own, (QKV,), TuneOptions((16, 64, 128))) == {QKV: [16, 128]}


def entry_of(tiles: Any, versions: Versions = NOW) -> Any:
    from lopa_cuda.tiles import TileEntry

    return TileEntry(tiles, versions.torch, versions.triton)


def test_what_other_versions_measured_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / H200.file_name
    before, now = OwnTiles(path, H200, EARLIER), OwnTiles(path, H200, NOW)
    for linear in (QKV, HEAD):
        before.add(linear, [Choice(16, B, 10.0, B, 9.0), Choice(64, B, 10.0, B, 9.0)])
    assert now.missing(QKV, [16, 64]) == [16, 64]
    now.add(QKV, [Choice(64, None, 10.0, B, 9.9)])
    entries = read_tiles(path).entries
    assert entries[QKV.shape] == entry_of(((64, None),))
    assert entries[HEAD.shape] == entry_of(((16, B), (64, B)), EARLIER), "other linears stay"


def test_numbers_of_tokens_of_two_searches_join(tmp_path: Path) -> None:
    own = OwnTiles(tmp_path / H200.file_name, H200, NOW)
    own.add(QKV, [Choice(64, A, 10.0, A, 9.0), Choice(128, A, 10.0, A, 9.0)])
    own.add(QKV, [Choice(16, B, 10.0, B, 9.0), Choice(64, None, 10.0, B, 9.0)])
    assert read_tiles(own.path).entries[QKV.shape].tiles == ((16, B), (64, None), (128, A))


def test_a_file_of_another_device_or_in_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    OwnTiles(path, H200, NOW).add(QKV, [Choice(64, A, 10.0, A, 9.0)])
    with pytest.raises(ConfigError, match="holds tiles of NVIDIA H200, this device is NVIDIA A: name another"):
        OwnTiles(path, Device("NVIDIA A", "8.0"), NOW)
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for its other end
    for wrong in ("/proc/none/tiles.json", path / "tiles.json", tmp_path, tmp_path / "pipe", tmp_path / ("a" * 300)):
        with pytest.raises(ConfigError, match=r"tiles cannot be written there \(.+\): set LOPA_TILES to another"):
            OwnTiles(Path(wrong), H200, NOW)


@pytest.mark.parametrize(
    ("update", "sentence"),
    [
        ({"mesh": "auto"}, "mesh auto is decided when it starts"),
        ({"mesh": MeshConfig(tensor_parallel_size=3)}, "tensor_parallel_size 3 does not divide"),
        ({"dtype": "float32"}, "profile gpu takes no tiles"),
        ({"kernels": "torch"}, "profile gpu takes no tiles"),
        ({"batch_invariant": True}, "profile gpu takes no tiles"),
    ],
)
def test_a_profile_without_tiles_is_refused(
    cuda: DeviceProfile, dream: RunConfig, update: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        list(tune_model(cuda.model_copy(update=update), dream, TuneOptions((64,))))


@pytest.mark.parametrize(
    ("has_device", "capability", "sentence"),
    [
        (False, (9, 0), "lopa tune measures on a CUDA device, and none is visible"),
        (True, (9, 0), "lopa tune needs Triton: run `pip install"),
        (True, (8, 0), "NVIDIA A100: tiles need compute capability 9.0 or later"),
    ],
)
def test_a_machine_that_cannot_measure_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, cuda: DeviceProfile, dream: RunConfig, has_device: bool,
    capability: tuple[int, int], sentence: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(tuning, "find_spec", lambda _: None if "Triton" in sentence else object())
    with pytest.raises(MissingCapability, match=sentence):
        list(platform_of(cuda).tune(cuda, dream, TuneOptions((64,))))


def test_devices_without_tiles_are_refused(cpu: DeviceProfile, dream: RunConfig) -> None:
    npu = DeviceProfile(name="ascend", engine="lopa_ascend", device="npu")
    for profile in (cpu, npu):
        with pytest.raises(ConfigError, match=f"profile {profile.name} is for device {profile.device}, and only CUDA"):
            platform_of(profile).tune(profile, dream, TuneOptions((64,)))


def test_a_start_installs_the_tiles_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, cuda: DeviceProfile
) -> None:
    monkeypatch.setenv("LOPA_TILES", str(tmp_path))
    monkeypatch.setattr(assemble, "this_device", lambda: H200)
    monkeypatch.setattr(assemble, "why_unavailable", lambda: None)
    run = RunConfig(model=str(ROOT / "configs/models/sdar_4b"), load_format="dummy")
    shape = LinearShape("bf16", 6144, 2560, "none")
    own = OwnTiles(tmp_path / H200.file_name, H200, NOW)
    own.add(ModelLinear("qkv", shape), [Choice(64, A, 10.0, A, 9.0)])
    with caplog.at_level(logging.INFO, "lopa_cuda"):
        told = assemble._install_tiles(cuda, run, load_model_config(run.model), tp_size=1, tp_rank=0)
    try:
        assert find_config(*shape[:3], 64, "none") == A
        assert find_config("bf16", 3584, 3584, 64, "none") == LinearConfig(64, 64, 2, 8)
    finally:
        install_tiles({})
    assert told == [str(tiles_folder() / H200.file_name), str(own.path)]
    (line,) = caplog.messages
    assert line.startswith(
        f"linear tiles of NVIDIA H200: {told[0]} and {told[1]}; on the library for want of an entry: o"
    )
    assert "qkv" not in line and line.endswith("(`lopa tune MODEL` measures them)")


def test_a_start_without_the_wide_kernel_leaves_its_tiles_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, cuda: DeviceProfile,
    dream: RunConfig,
) -> None:  # fmt: skip
    monkeypatch.setenv("LOPA_TILES", str(tmp_path))
    monkeypatch.setattr(assemble, "this_device", lambda: H200)
    shape = LinearShape("bf16", 4608, 3584, "none")
    OwnTiles(tmp_path / H200.file_name, H200, NOW).add(QKV, [Choice(160, WideConfig(72, 2), 10.0, None, 9.0)])
    for why, expected in (("there is no NVRTC of CUDA 13.0", None), (None, WideConfig(72, 2))):
        monkeypatch.setattr(assemble, "why_unavailable", lambda why=why: why)
        with caplog.at_level(logging.INFO, "lopa_cuda"):
            assemble._install_tiles(cuda, dream, load_model_config(dream.model), tp_size=1, tp_rank=0)
        try:
            assert find_config(*shape[:3], 160, "none") == expected
        finally:
            install_tiles({})
    (line,) = (line for line in caplog.messages if line.startswith("no wide tiles"))
    assert line.startswith("no wide tiles on this device: there is no NVRTC of CUDA 13.0; linears")


def test_tiles_are_asked_for_where_linears_are_looked_up_by_shape(cuda: DeviceProfile, dream: RunConfig) -> None:
    config = load_model_config(dream.model)
    assert assemble.chooses_tiles(cuda, torch.bfloat16, config)
    assert not assemble.chooses_tiles(cuda, torch.float32, config)
    assert not assemble.chooses_tiles(cuda.model_copy(update={"batch_invariant": True}), torch.bfloat16, config)
    assert not assemble.chooses_tiles(cuda.model_copy(update={"device": "cpu"}), torch.bfloat16, config)


def lopa(*arguments: str) -> subprocess.CompletedProcess[str]:
    return started.lopa("tune", *arguments, env={"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("-p", "nope", "demo"), "lopa: nope: no such file, and not one of the profiles in"),
        (("-p", "h200_tp1_bp1", "nope"), "lopa: nope: no such file or folder, and not one of the runs in"),
        (
            ("-p", "h200_tp1_bp1", "dream_7b_dummy"),
            "lopa: lopa tune measures on a CUDA device, and none is visible: run it",
        ),
        (
            ("-p", "ascend_910c_tp4_bp4", "dream_7b_dummy"),
            "lopa: profile ascend_910c_tp4_bp4 is for device npu, and only CUDA",
        ),
        pytest.param(
            ("-p", "h200_tp1_bp1", "dream_7b_dummy", "--set", "dtype=float32"),
            "lopa: profile h200_tp1_bp1 takes no tiles",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("-p", "h200_tp1_bp1", "dream_7b_dummy", "--set", "model=none"), "lopa: none", marks=pytest.mark.slow
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    done = lopa(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(sentence) and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["0", "32769", "x", "1.5"])
def test_numbers_of_tokens_are_checked(tokens: str) -> None:
    done = lopa("-p", "cpu", "demo", "--tokens", "16", tokens)
    assert done.returncode == 2 and f"'{tokens}': give whole numbers from 1 to 32768" in done.stderr
