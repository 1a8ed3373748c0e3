"""Two launchers as two nodes, on one machine or with networks of their own: nothing done is lost, and both say why."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.engine.batch.conftest import model  # noqa: F401  a fixture
from tests.engine.batch.test_run_batch import finish, start, texts, wait_for_lines, workers_of, write_files
from tests.engine.processes.namespaces import INTERFACE, Node, nodes
from tests.ports import free_port
from tests.soaking import soaking

DP, BP, TP = "data_parallel_size", "branch_parallel_size", "tensor_parallel_size"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "axis"), [(0, BP), (1, DP), *(pytest.param(*one, marks=soaking) for one in ((0, DP), (1, BP)))]
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


TOLD_S = 30.0


def start_on(folder: Path, both: list[Node], *options: str) -> list[subprocess.Popen[str]]:
    """The same job on each node, whose disk they share."""
    return [
        start(
            folder, *options, inside=node.inside, NNODES=f"{len(both)}", NODE_RANK=f"{rank}",
            MASTER_ADDR=both[0].address, MASTER_PORT="29500", GLOO_SOCKET_IFNAME=INTERFACE,
        )
        for rank, node in enumerate(both)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[int, str]:  # noqa: F811
    """The texts of one node."""
    folder = tmp_path_factory.mktemp("one")
    write_files(folder, model)
    finish(start(folder))
    return texts(folder)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [TP, BP, DP])
def test_two_nodes_give_the_tokens_of_one(axis: str, tmp_path: Path, model: Path, of_one: dict[int, str]) -> None:  # noqa: F811
    write_files(tmp_path, model, mesh={axis: 2})
    with nodes(2) as both:
        for process in start_on(tmp_path, both):
            finish(process)
    assert texts(tmp_path) == of_one and len(of_one) == 6


@pytest.mark.slow
@pytest.mark.parametrize("axis", [TP, *(pytest.param(axis, marks=soaking) for axis in (BP, DP))])
def test_a_node_that_is_cut_off_is_named_and_a_restart_goes_on(axis: str, tmp_path: Path, model: Path) -> None:  # noqa: F811
    write_files(tmp_path, model, num_requests=4000, mesh={axis: 2})
    with nodes(2) as both:
        processes = start_on(tmp_path, both)
        wait_for_lines(tmp_path / "o.jsonl", 4)
        both[1].cut_off()
        cut_at = time.monotonic()
        said, took = [], []
        for process in processes:
            said.append(process.communicate(timeout=300)[1])
            took.append(time.monotonic() - cut_at)
        for node, other in ((0, 1), (1, 0)):
            last = said[node].splitlines()[-1]
            assert f"node {other} ({both[other].address}, rank {other})" in last, said
            assert "Traceback" not in said[node] and processes[node].returncode not in (0, None)
        assert max(took) < TOLD_S, took
    kept = texts(tmp_path)
    assert len(kept) >= 4
    limit = max(kept) + 2
    with nodes(2) as both:
        for process in start_on(tmp_path, both, "--set", f"input.limit={limit}"):
            finish(process)
    resumed = texts(tmp_path)
    assert len(resumed) == limit and kept.items() <= resumed.items()
