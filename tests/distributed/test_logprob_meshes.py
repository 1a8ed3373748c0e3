"""Log probabilities do not depend on how vocabulary and branches are spread over ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.logprobs_worker import told_of
from tests.distributed.meshes import start_ranks
from tests.distributed.ranks import cpu_profile
from tests.soaking import soaking

NAMES = {
    "lopa_cuda": ("llada dual", "fast_dllm_v2 dual", "llada2 edits", "llada2_2"),
    "lopa_ascend": ("llada d2f", "sdar fused"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bp", "tp", "engine"),
    [
        (2, 2, "lopa_cuda"),
        (1, 2, "lopa_ascend"),
        pytest.param(2, 1, "lopa_cuda", marks=soaking),
        pytest.param(1, 2, "lopa_cuda", marks=soaking),
        pytest.param(2, 1, "lopa_ascend", marks=soaking),
        pytest.param(2, 2, "lopa_ascend", marks=soaking),
    ],
)
def test_the_mesh_does_not_change_them(tmp_path: Path, bp: int, tp: int, engine: str) -> None:
    start_ranks("logprobs_worker", (1, bp, tp), *((engine, name, tmp_path) for name in NAMES[engine]))
    for name in NAMES[engine]:
        found = json.loads((tmp_path / f"{name}.json").read_text())
        alone, _ = told_of(cpu_profile(engine), name)
        assert found.pop()["likelihoods"] == pytest.approx(alone.pop()["likelihoods"], abs=1e-3)
        for own_of, wanted_of in zip(found, alone, strict=True):
            for id, wanted in wanted_of.items():
                own = own_of[id]
                assert (own["tokens"], own["steps"]) == (wanted["tokens"], wanted["steps"])
                assert own["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-4)
                same = sum(a == b for a, b in zip(own["best"], wanted["best"], strict=True))
                assert same >= 0.95 * len(wanted["best"]), "alternatives may tie"
