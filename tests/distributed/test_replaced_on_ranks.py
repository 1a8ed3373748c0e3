"""Weights are replaced on all ranks or on none, and decode what a fresh start on one rank does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import MeshConfig
from tests.conftest import GOLDEN
from tests.distributed import weights_worker
from tests.distributed.meshes import start_ranks
from tests.other_weights import write_other
from tests.soaking import soaking

MODEL = GOLDEN / "model_a"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    parent = tmp_path_factory.mktemp("models")
    return [str(MODEL), *(str(write_other(parent / str(number), number, MODEL)) for number in (10, 20))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bp", "tp", "engine"),
    [
        (1, 2, "lopa_cuda"),
        (2, 1, "lopa_ascend"),
        pytest.param(2, 1, "lopa_cuda", marks=soaking),
        pytest.param(1, 2, "lopa_ascend", marks=soaking),
    ],
)
def test_all_ranks_replace_or_none(engine: str, bp: int, tp: int, models: list[str], tmp_path: Path) -> None:
    fresh = [weights_worker.tokens_of(weights_worker.engine_of(engine, model, MeshConfig())) for model in models]
    assert fresh[0] != fresh[1] != fresh[2] != fresh[0]
    start_ranks("weights_worker", (1, bp, tp), (engine, models, tmp_path))
    ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    assert len(ranks) == bp * tp
    for *replaced, (problem, after), (shortage, released), resumed in ranks:
        assert replaced == fresh
        assert "none: no such folder" in problem, "what one rank cannot do, none does"
        assert "not all free" in shortage and released == ["kv_cache", "weights"]
        assert after == resumed == fresh[-1]
