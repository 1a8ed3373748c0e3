"""The ranks of a test: the first pass of each trace over tensor-parallel ranks, written as JSON by the first."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from common.checkpoint import load_model_config
from common.config import MeshConfig
from tests.distributed.ranks import cpu_profile, fork_ranks
from tests.engine.families.passes import engine_of, first_pass, read


def run_rank(mesh: MeshConfig, name: str, output: Path) -> None:
    trace = read(name)
    engine = engine_of(cpu_profile(mesh=mesh), trace)
    predictions = engine.forward(first_pass(trace, load_model_config(trace["folder"])))
    if engine.mesh.is_leader:
        output.write_text(json.dumps(predictions.values_3T.tolist()))
    engine.close()


def main() -> None:
    """python -m tests.distributed.families_worker TP FOLDER TRACE..."""
    mesh = MeshConfig(data_parallel_size=1, branch_parallel_size=1, tensor_parallel_size=int(sys.argv[1]))
    calls = [(mesh, name, Path(sys.argv[2]) / f"{number}.json") for number, name in enumerate(sys.argv[3:])]
    fork_ranks(run_rank, mesh.num_processes, *calls)


if __name__ == "__main__":
    main()
