"""What `lopa tune` times computes what the engine does, in the interpreter's process (test_kernels_interpreter.py)."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from lopa_cuda.tiles import Kind, LinearConfig, LinearShape, ModelLinear, find_config

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in test_in_the_interpreter's process")
if IS_INTERPRETED:
    from lopa_cuda.tuning import pair, run, stopwatch

TILE = LinearConfig(32, 32, 1, 2)
LINEARS = {
    "qkv": (128, 64, "none"), "o": (64, 64, "none"), "gate_up": (256, 64, "swiglu"), "down": (64, 128, "none"),
    "shared_gate_up": (64, 64, "swiglu"), "shared_down": (64, 32, "none"), "head": (100, 64, "none"),
}  # fmt: skip


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[LinearConfig | None]:
    """The tiles that were in use when a run was timed; a run is called once, on the CPU."""
    used: list[LinearConfig | None] = []

    def once(run: Callable[[int], object], launches: int, replays: int) -> float:
        run(launches - 1)
        used.append(find_config("bf16", *LINEARS["o"][:2], 20, "none"))
        return 1.0

    monkeypatch.setattr(stopwatch, "DEVICE", "cpu")
    monkeypatch.setattr(stopwatch, "ROTATION_BYTES", 1)
    monkeypatch.setattr(pair, "graph_us", once)
    return used


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("name", LINEARS)
def test_every_linear_runs_with_its_stage(timed: list[LinearConfig | None], kind: Kind, name: str) -> None:
    num_out, num_in, fusion = LINEARS[name]
    linear = ModelLinear(name, LinearShape(kind, num_out, num_in, fusion))  # type: ignore[arg-type]
    found = pair.LinearPair(linear, pair.LayerSizes(64, 4, 2, 16, 16))
    tiles = [TILE] if fusion == "swiglu" or num_in == 32 else [TILE, TILE._replace(splits=2)]
    assert [found.try_us(20, tile) for tile in (None, *tiles)] == [1.0] * (1 + len(tiles))
    assert all(found.is_right(20, tile) for tile in tiles)


def test_a_search_times_every_tile_beside_the_library(timed: list[LinearConfig | None]) -> None:
    linear, tiles = ModelLinear("o", LinearShape("bf16", 64, 64, "none")), [TILE, TILE._replace(splits=2)]
    (choice,) = run._search(linear, pair.LayerSizes(64, 4, 2, 16, 16), {20: tiles})
    assert (choice.library_us, choice.best_us, choice.config) == (1.0, 1.0, None)  # no tile is faster
    assert set(timed) == {None, *tiles}


def test_the_tile_that_is_asked_for_is_in_use_and_gone_behind(timed: list[LinearConfig | None]) -> None:
    shape = LinearShape("bf16", 64, 64, "none")
    found = pair.LinearPair(ModelLinear("o", shape), pair.LayerSizes(64, 4, 2, 16, 16))
    for tile in (TILE, None):
        found.us(20, tile)
    assert timed == [TILE, None]
    assert find_config("bf16", 64, 64, 20, "none") is None


def test_a_tile_that_computes_something_else_is_found_out(
    monkeypatch: pytest.MonkeyPatch, timed: list[LinearConfig | None]
) -> None:
    found = pair.LinearPair(ModelLinear("o", LinearShape("bf16", 64, 64, "none")), pair.LayerSizes(64, 4, 2, 16, 16))
    plain = pair.LinearPair._product

    def wrong(self: pair.LinearPair, *arguments: object, **options: object) -> object:
        y = plain(self, *arguments, **options)
        return y * 1.1 if find_config("bf16", 64, 64, 20, "none") else y

    monkeypatch.setattr(pair.LinearPair, "_product", wrong)
    assert not found.is_right(20, TILE)


def test_only_what_says_that_a_tile_does_not_fit_is_taken_for_it(
    monkeypatch: pytest.MonkeyPatch, timed: list[LinearConfig | None]
) -> None:
    found = pair.LinearPair(ModelLinear("o", LinearShape("bf16", 64, 64, "none")), pair.LayerSizes(64, 4, 2, 16, 16))

    def failing(error: Exception) -> Callable[..., float]:
        def run(*_: object) -> float:
            raise error

        return run

    from triton.runtime.errors import OutOfResources

    for error in (OutOfResources(300_000, 232_448, "shared memory"), RuntimeError("PassManager::run failed")):
        monkeypatch.setattr(pair, "graph_us", failing(error))
        assert found.try_us(20, TILE) is None
    monkeypatch.setattr(pair, "graph_us", failing(RuntimeError("CUDA error: an illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal"):
        found.try_us(20, TILE)
