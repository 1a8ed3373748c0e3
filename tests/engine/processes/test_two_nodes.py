"""Two launchers on one machine as two nodes: whichever loses a worker first, both say why, and nothing done is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.engine.batch.conftest import model  # noqa: F401  a fixture
from tests.engine.batch.test_run_batch import finish, start, texts, wait_for_lines, workers_of, write_files
from tests.ports import free_port
from tests.soaking import soaking

DP, BP = "data_parallel_size", "branch_parallel_size"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "axis"),
    [(0, BP), (1, DP), *(pytest.param(*one, marks=soaking) for one in ((0, DP), (1, BP)))],
)
def test_both_nodes_name_the_worker_that_was_killed(
    victim: int,
    axis: str,
    tmp_path: Path,
    model: Path,  # noqa: F811
) -> None:
    write_files(tmp_path, model, num_requests=400, mesh={axis: 2})
    port = str(free_port())
    nodes = [
        start(tmp_path, NNODES="2", NODE_RANK=str(node), MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for node in (0, 1)
    ]
    wait_for_lines(tmp_path / "o.jsonl", 4)
    os.kill(workers_of(nodes[victim])[0], signal.SIGKILL)
    killed_at = time.monotonic()
    said = {node: process.communicate(timeout=400)[1].splitlines()[-1] for node, process in enumerate(nodes)}
    assert time.monotonic() - killed_at < 120
    reason = f"rank {victim} (pid "
    for node, sentence in said.items():
        assert "lopa: " in sentence and reason in sentence and "SIGKILL" in sentence, said
        assert nodes[node].returncode != 0
    assert nodes[victim].returncode == 137
    kept = texts(tmp_path)
    assert len(kept) >= 4
    limit = max(kept) + 2
    finish(start(tmp_path, "--set", f"input.limit={limit}", "--set", f"mesh.{axis}=1"))
    resumed = texts(tmp_path)
    assert len(resumed) == limit and kept.items() <= resumed.items()
