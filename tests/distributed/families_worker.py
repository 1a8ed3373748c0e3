"""The ranks of a test: the first pass of each trace over tensor-parallel ranks, written as JSON by the first."""

from __future__ import annotations

import json
from pathlib import Path

from common.checkpoint import load_model_config
from common.config import MeshConfig
from tests.distributed.ranks import cpu_profile
from tests.engine.families.passes import engine_of, first_pass, read


def run_rank(mesh: MeshConfig, name: str, number: int, output: str) -> None:
    trace = read(name)
    engine = engine_of(cpu_profile(mesh=mesh), trace)
    predictions = engine.forward(first_pass(trace, load_model_config(trace["folder"])))
    if engine.mesh.is_leader:
        Path(output, f"{number}.json").write_text(json.dumps(predictions.values_3T.tolist()))
    engine.close()
