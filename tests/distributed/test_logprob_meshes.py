"""Log probabilities do not depend on how vocabulary and branches are spread over ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.logprobs_worker import profile_of, told_of
from tests.distributed.meshes import ROOT
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
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.distributed.logprobs_worker", str(bp), str(tp), str(tmp_path), engine]
    done = subprocess.run(
        [*command, *NAMES[engine]], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name in NAMES[engine]:
        found = json.loads((tmp_path / f"{name}.json").read_text())
        alone, _ = told_of(profile_of(engine), name)
        assert found.pop()["likelihoods"] == pytest.approx(alone.pop()["likelihoods"], abs=1e-3)
        for own_of, wanted_of in zip(found, alone, strict=True):
            for id, wanted in wanted_of.items():
                own = own_of[id]
                assert (own["tokens"], own["steps"]) == (wanted["tokens"], wanted["steps"])
                assert own["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-4)
                same = sum(a == b for a, b in zip(own["best"], wanted["best"], strict=True))
                assert same >= 0.95 * len(wanted["best"]), "alternatives may tie"
