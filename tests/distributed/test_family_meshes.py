"""Tensor parallelism changes no family's predictions, also where ranks share KV heads and split experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.checkpoint import load_model_config
from common.config import DeviceProfile
from tests.distributed.meshes import start_ranks
from tests.engine.families.passes import TRACES, engine_of, first_pass, read

SMALL = TRACES[1::2]  # of each family's model_b, three of which have two KV heads for the four ranks


@pytest.mark.slow
def test_tp_changes_no_prediction(cpu: DeviceProfile, tmp_path: Path) -> None:
    start_ranks("families_worker", (1, 1, 4), *((name, number, tmp_path) for number, name in enumerate(SMALL)))
    for number, name in enumerate(SMALL):
        shared, trace = json.loads((tmp_path / f"{number}.json").read_text()), read(name)
        alone = engine_of(cpu, trace).forward(first_pass(trace, load_model_config(trace["folder"]))).values_3T
        assert shared[0] == alone[0].tolist(), name
        for row in (1, 2):
            assert shared[row] == pytest.approx(alone[row].tolist(), abs=1e-5), name
