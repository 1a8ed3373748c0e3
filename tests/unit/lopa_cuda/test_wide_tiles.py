"""Tiles of the wide kernel: how they lie on a multiprocessor, what is refused, what is compiled."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from common.errors import ConfigError, EngineError
from lopa_cuda.tiles import (
    MOST_WIDE_TOKENS,
    Kind,
    LinearConfig,
    LinearShape,
    TileEntry,
    TilesFile,
    WideConfig,
    impossible,
    read_tiles,
    save_tiles,
    to_json,
    wide_layout,
    without_wide,
)
from lopa_cuda.wgmma import compiler
from lopa_cuda.wgmma.linear import source

KINDS: tuple[Kind, ...] = ("bf16", "int8", "fp8")
SHAPE = LinearShape("bf16", 3584, 3584, "none")
MULTIPROCESSOR_REGISTERS = 65536


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_gated", [False, True])
def test_what_is_not_refused_fits_a_multiprocessor(kind: Kind, is_gated: bool) -> None:
    fitting = 0
    for depth, rows, splits, share, num_tokens in product(
        (3584, 18944), range(16, 257, 8), (1, 2, 7), (1, 2), (1, 64, 65, 200, 256, 320)
    ):
        try:
            layout = wide_layout(kind, WideConfig(rows, splits, share), num_tokens, depth, is_gated)
        except ValueError:
            continue
        fitting += 1
        assert num_tokens <= layout.tokens < num_tokens + 64 and layout.tokens % (64 * share) in (0, 64 * share // 2)
        assert layout.stages >= 3 and layout.shared_bytes <= 227 * 1024
        assert rows % layout.chunk == 0 and layout.columns * (2 if is_gated else 1) == rows
        assert (layout.unit_blocks > 0) == (kind == "fp8" and depth > 4096 * splits)
        sums = layout.tiles * rows // 2 * (2 if layout.unit_blocks else 1)
        assert sums * 128 * layout.warpgroups < MULTIPROCESSOR_REGISTERS and layout.threads <= 1024
    assert fitting > 200


@pytest.mark.parametrize(
    ("shape", "config", "num_tokens", "why"),
    [
        (SHAPE, WideConfig(12), 128, "12 rows: the matrix unit takes 16 to 256 in steps of 8"),
        (SHAPE._replace(kind="int8"), WideConfig(24), 128, "24 rows: the matrix unit takes 16 to 256 in steps of 16"),
        (SHAPE._replace(fusion="swiglu"), WideConfig(24), 128, "24 rows"),
        (SHAPE, WideConfig(512), 128, "512 rows"),
        (SHAPE, WideConfig(64), MOST_WIDE_TOKENS + 1, "321 tokens: a tile has at most 320 unless `tokens` cuts them"),
        (SHAPE, WideConfig(64, tokens=96), 128, "96 tokens of a tile: they come in steps of 64"),
        (SHAPE, WideConfig(64, 8, 2), 128, "a cluster of 16 programs: at most 8"),
        (SHAPE, WideConfig(256), 256, "the sums of 256 rows do not fit 2 warpgroups' registers"),
        (SHAPE, WideConfig(64), 320, "320 tokens of each of 1 programs that share: at most 256"),
        (SHAPE._replace(num_in=256), WideConfig(64, 5), 128, "5 splits of 4 blocks"),
        (SHAPE._replace(num_out=3580), WideConfig(64), 128, "3580 output channels"),
        (SHAPE._replace(num_in=3580), WideConfig(64), 128, "3580 input channels"),
    ],
)
def test_what_cannot_run_is_refused_in_words(shape: LinearShape, config: WideConfig, num_tokens: int, why: str) -> None:
    assert why in (impossible(shape, config, num_tokens) or "nothing")
    assert impossible(SHAPE, WideConfig(64, 2), 128) is None


def test_a_wide_tile_is_written_and_read_back(tmp_path: Path) -> None:
    cut = WideConfig(72, tokens=128)
    tiles = (
        (64, LinearConfig(64, 128, 2, 4)),
        (192, WideConfig(128, 4)),
        (224, cut),
        (256, WideConfig(96)),
        (320, None),
    )
    file = TilesFile("NVIDIA Test", "9.0", {SHAPE: TileEntry(tiles, "2.11.0", "3.6.0")})
    save_tiles(tmp_path / "tiles.json", file)
    assert read_tiles(tmp_path / "tiles.json") == file
    assert '{"most_tokens": 256, "config": {"rows": 96}}' in to_json(file)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ('{"rows": "96"}', "tiles.0.config.rows: set it to a whole number"),
        ('{"rows": 96, "stages": 4}', "tiles.0.config.stages: unknown key"),
        ('{"rows": 96, "splits": 9}', "tiles.0.config.splits: "),
        ('{"rows": 96, "tokens": 320}', "tiles.0.config.tokens: "),
        ('{"rows": 96, "tokens": 96}', "cannot run: 96 tokens of a tile: they come in steps of 64"),
        ('{"rows": 96, "splits": 8, "share": 8}', "the tile of up to 192 tokens cannot run: a cluster of 64 programs"),
    ],
)
def test_a_wide_tile_that_is_wrong_is_named(tmp_path: Path, config: str, why: str) -> None:
    path = tmp_path / "tiles.json"
    tiles = ((192, WideConfig(96)),)
    text = to_json(TilesFile("NVIDIA Test", "9.0", {SHAPE: TileEntry(tiles, "2.11.0", "3.6.0")}))
    path.write_text(text.replace('{"rows": 96}', config))
    with pytest.raises(ConfigError, match=re.escape(why)):
        read_tiles(path)


def test_a_tile_must_run_at_every_number_of_tokens_that_it_serves(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    assert impossible(SHAPE, WideConfig(64, share=3), 192) is None
    for tiles, why in (
        (((192, WideConfig(64, share=3)),), "tokens of each of 3 programs that share"),
        (((128, None), (192, WideConfig(64, share=3))), None),
    ):
        path.write_text(to_json(TilesFile("NVIDIA Test", "9.0", {SHAPE: TileEntry(tiles, "2.11.0", "3.6.0")})))
        if why is None:
            assert read_tiles(path).entries[SHAPE].tiles == tiles
        else:
            with pytest.raises(ConfigError, match=why):
                read_tiles(path)


def test_a_device_without_the_kernel_keeps_the_other_tiles() -> None:
    narrow = (64, LinearConfig(64, 128, 2, 4))
    other = SHAPE._replace(num_out=128)
    table = {SHAPE: (narrow, (192, WideConfig(128, 4)), (256, None)), other: ((192, WideConfig(64)),)}
    assert without_wide(table) == {SHAPE: (narrow, (192, None), (256, None)), other: ((192, None),)}


def test_the_kernel_is_compiled_from_its_constants_and_one_instruction() -> None:
    config = WideConfig(144)
    text = source("fp8", config, wide_layout("fp8", config, 192, 3584, is_gated=True), is_gated=True)
    for line in ("#define WARPGROUPS 3", "#define ROWS 144", "#define IS_FLOAT8 1", "#define IS_GATED 1"):
        assert line in text.splitlines()
    assert "#define IS_CUT 0" in text
    config = WideConfig(144, tokens=128)
    cut = source("fp8", config, wide_layout("fp8", config, 1552, 3584, is_gated=True), is_gated=True)
    assert "#define IS_CUT 1" in cut and "#define WARPGROUPS 2" in cut, "as many warpgroups as its tokens need"
    assert "m64n144k32.f32.e4m3.e4m3" in text and text.count("wgmma.mma_async") == 1
    constants = set(re.findall(r"^#define (\w+)", text, re.MULTILINE))
    assert all(len(re.findall(rf"\b{name}\b", text)) > 1 for name in constants), "every constant is used"


def test_a_cubin_that_a_crash_left_empty_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled = iter([b"\x7fELF first", b"\x7fELF second", b"\x7fELF other"])
    monkeypatch.setenv(compiler.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiler, "_nvrtc", object)
    monkeypatch.setattr(compiler, "_version", lambda nvrtc: "13.0")
    monkeypatch.setattr(compiler, "_compile", lambda *_: next(compiled))
    assert [compiler.compiled("text", "sm_90a") for _ in range(2)] == [b"\x7fELF first"] * 2
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"")
    assert compiler.compiled("text", "sm_90a") == b"\x7fELF second" == path.read_bytes()
    assert compiler.compiled("other text", "sm_90a") == b"\x7fELF other"


@pytest.fixture
def nvrtc() -> None:
    if not compiler.is_available():
        pytest.skip("no NVRTC here: it comes with torch for CUDA")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("config", "num_tokens", "depth", "is_gated"),
    [
        (WideConfig(144), 192, 3584, True),
        (WideConfig(64, 2), 256, 18944, False),
        (WideConfig(112, share=2, tokens=192), 1552, 18944, False),
    ],
)
def test_nvrtc_compiles_it_and_the_cubin_is_kept(
    nvrtc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Kind, config: WideConfig, num_tokens: int,
    depth: int, is_gated: bool,
) -> None:  # fmt: skip
    monkeypatch.setenv(compiler.FOLDER_VARIABLE, str(tmp_path))
    text = source(kind, config, wide_layout(kind, config, num_tokens, depth, is_gated), is_gated)
    cubin = compiler.compiled(text, "sm_90a")
    assert cubin.startswith(b"\x7fELF") and [path.read_bytes() for path in tmp_path.iterdir()] == [cubin]
    assert compiler.compiled(text, "sm_90a") == cubin


def test_what_does_not_compile_is_one_sentence(nvrtc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(compiler.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(EngineError, match=r"cannot compile a linear's tile for sm_90a: .*nonsense"):
        compiler.compiled("nonsense", "sm_90a")
