"""Files of tiles: what is committed can run, what is written is read back, and what is wrong is one sentence."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.config import tiles_folder
from common.errors import ConfigError
from lopa_cuda.tiles import (
    Device,
    LinearConfig,
    LinearShape,
    TileEntry,
    TilesFile,
    find_config,
    only_tiles,
    read_tiles,
    save_tiles,
    shared_bytes,
    to_json,
)

SHAPE = LinearShape("bf16", 4608, 3584, "none")
TILES = ((32, LinearConfig(64, 128, 2, 4, early=True)), (64, None), (128, LinearConfig(64, 64, 2, 8, warps=8)))
FILE = TilesFile("NVIDIA Test 80GB", "9.0", {SHAPE: TileEntry(TILES, "2.11.0", "3.6.0")})


@pytest.mark.parametrize("path", sorted(tiles_folder().glob("*.json")), ids=lambda path: path.stem)
def test_a_committed_file_is_that_of_its_device_and_written_by_the_writer(path: Path) -> None:
    file = read_tiles(path)
    assert path.name == Device(file.device, file.compute_capability).file_name
    assert path.read_text() == to_json(file)


def test_the_models_whose_tiles_ship_have_them() -> None:
    entries = read_tiles(tiles_folder() / "nvidia_h200.json").entries
    with only_tiles({shape: entry.tiles for shape, entry in entries.items()}):
        assert find_config("bf16", 4608, 3584, 64, "none") == LinearConfig(128, 128, 3, 4, early=True)
        assert find_config("bf16", 4608, 3584, 65, "none") is None
        assert find_config("fp8", 37888, 3584, 1, "swiglu") == LinearConfig(64, 128, 1, 3)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "nvidia_test_80gb.json"
    for _ in range(2):  # over what is there
        save_tiles(path, FILE)
        assert read_tiles(path) == FILE
    assert [found.name for found in path.parent.iterdir()] == [path.name], "nothing unfinished is left"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiles.json"
    save_tiles(path, FILE)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_tiles(path, TilesFile("other", "9.0"))
    assert read_tiles(path) == FILE
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_the_first_limit_that_holds_the_tokens_decides() -> None:
    with only_tiles({SHAPE: TILES}):
        found = [find_config(*SHAPE[:3], num_tokens, "none") for num_tokens in (1, 32, 33, 64, 65, 128, 129)]
    small, _, large = (config for _, config in TILES)
    assert found == [small, small, None, None, large, large, None]
    assert find_config(*SHAPE[:3], 1, "none") is None, "the table is gone after only_tiles"


def test_tiles_of_few_rows_are_filled_up_to_64_tokens() -> None:
    wide, narrow = LinearConfig(64, 128, 1, 4), LinearConfig(32, 128, 1, 4)
    assert [wide.tile_tokens(n) for n in (1, 16, 17, 64, 65, 500)] == [16, 16, 32, 64, 128, 128]
    assert [narrow.tile_tokens(n) for n in (1, 65)] == [64, 128]
    assert shared_bytes(SHAPE, wide, 17) == (32 + 64) * 128 * 2 * 4
    assert shared_bytes(LinearShape("fp8", 64, 128, "swiglu"), wide, 17) == (32 + 128) * 128 * 4


def entry(tree: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = tree["linears"][0]
    return found


def config(tree: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = entry(tree)["tiles"][0]["config"]
    return found


def gated(tree: dict[str, Any]) -> None:
    entry(tree)["fusion"] = "swiglu"


NAMED = "linears.0 (bf16 4608 3584 none)"
REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an unknown key of the file": (lambda tree: tree.update(cards=1), "cards: unknown key"),
    "no device": (lambda tree: tree.pop("device"), "device: this key is missing: add it"),
    "a capability that is none": (lambda tree: tree.update(compute_capability="nine"), "compute_capability: "),
    "linears that are no list": (lambda tree: tree.update(linears={}), "linears: write it as a list"),
    "an entry that is no object": (lambda tree: tree.update(linears=[3]), "linears.0: "),
    "an unknown key of an entry": (lambda tree: entry(tree).update(mode=1), f"{NAMED}.mode: unknown key"),
    "an unknown kind": (lambda tree: entry(tree).update(kind="fp4"), "(fp4 4608 3584 none).kind: did you mean fp8?"),
    "text for a number": (lambda tree: entry(tree).update(input_channels="x"), ".input_channels: set it to a whole"),
    "true for a number": (lambda tree: config(tree).update(stages=True), "stages: set it to a whole number"),
    "a fraction": (lambda tree: config(tree).update(splits=1.5), "splits: set it to a whole number"),
    "no tiles": (lambda tree: entry(tree).update(tiles=[]), f"{NAMED}.tiles: write at least 1 of them"),
    "limits that do not ascend": (
        lambda tree: entry(tree)["tiles"].reverse(), f"{NAMED}: most_tokens 128, 64, 32 do not ascend: sort the tiles",
    ),
    "the same limit twice": (
        lambda tree: entry(tree)["tiles"][1].update(most_tokens=32), "most_tokens 32, 32, 128 do not ascend",
    ),
    "a limit without a tile": (lambda tree: entry(tree)["tiles"][0].pop("config"), "tiles.0.config: this key is miss"),
    "an unknown key of a tile": (lambda tree: config(tree).update(block=1), f"{NAMED}.tiles.0.config.block: unknown"),
    "a block of 96 rows": (lambda tree: config(tree).update(block_c=96), "config.block_c: set it to 16, 32"),
    "a block that does not divide": (
        lambda tree: entry(tree).update(input_channels=3600), "block_k 128 does not divide 3600 input channels",
    ),
    "more parts than blocks": (lambda tree: config(tree).update(splits=29), "29 splits of 28 blocks"),
    "a split gated linear": (gated, "up to 32 tokens cannot run: swiglu needs the whole sum"),
    "a tail without swiglu": (lambda tree: config(tree).update(tail=16), "a tail is for swiglu without swap"),
    "more than the shared memory": (
        lambda tree: config(tree).update(block_c=256, stages=8), "589824 bytes of shared memory, 232448 are there",
    ),
    "a second entry": (lambda tree: tree["linears"].append(entry(tree)), "linears.1: a second entry for bf16 4608x"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_a_sentence_with_file_and_entry(tmp_path: Path, case: str) -> None:
    change, sentence = REFUSED[case]
    tree = copy.deepcopy(json.loads(to_json(FILE)))
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(tree))
    assert read_tiles(path) == FILE
    change(tree)
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError) as refusal:
        read_tiles(path)
    assert str(refusal.value).startswith(f"{path}: ") and sentence in str(refusal.value), str(refusal.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", '{"device": NaN}', "\x00"])
def test_what_is_no_file_of_tiles_is_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"tiles\.json: "):
        read_tiles(path)
