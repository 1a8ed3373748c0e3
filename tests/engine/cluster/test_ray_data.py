"""Batches on Ray: the texts are one process's, whatever the number of actors and whatever happens to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.cluster import DecodeRows, map_options, ray_options
from common.config import load_profile, load_run
from tests.engine.cluster.rayed import ROOT, WAIT_S, a_cluster, kill_one, needs_ray, wait_for

pytestmark = [pytest.mark.slow, needs_ray]
COUNT = int(os.environ.get("LOPA_RAY_REQUESTS", "24"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with a_cluster() as address:
        yield address


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The texts of one process without Ray, by id."""
    output = tmp_path_factory.mktemp("one") / "one.jsonl"
    subprocess.run(command(output), cwd=ROOT, check=True, timeout=WAIT_S)
    return texts(output)


def command(output: Path, *more: str) -> list[str]:
    settings = [f"input.limit={COUNT}", "max_num_requests=4", f"output.path={output}"]
    given = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "common.commands.job", "run", "cpu", "demo", *given, *more]


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def texts(output: Path) -> dict[str, str]:
    return {record["id"]: record["text"] for record in lines(output)}


def test_two_actors_one_killed_give_every_row_once_with_one_process_s_text(
    cluster: str, wanted: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "two.jsonl"
    run = subprocess.Popen(command(output, "--ray", cluster, "--replicas", "2"), cwd=ROOT)
    wait_for(lambda: output.exists() and len(lines(output)) >= 4, "some rows")
    kill_one("ray::MapWorker")
    assert run.wait(WAIT_S) == 0
    ids = [record["id"] for record in lines(output)]
    assert sorted(ids) == sorted(wanted)
    assert texts(output) == wanted
    metrics = json.loads((tmp_path / "two.metrics.json").read_text())
    assert metrics["environment"]["ray_replicas"] == 2
    assert metrics["requests"]["finished"] == COUNT


def test_a_finished_output_is_left_as_it_is_and_a_shortened_one_completed(
    cluster: str, wanted: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "again.jsonl"
    subprocess.run(command(output), cwd=ROOT, check=True, timeout=WAIT_S)
    kept = output.read_text().splitlines(keepends=True)[: COUNT - 3]
    output.write_text("".join(kept))
    subprocess.run(command(output, "--ray", cluster), cwd=ROOT, check=True, timeout=WAIT_S)
    assert output.read_text().startswith("".join(kept))
    assert texts(output) == wanted


def test_rows_of_a_dataset_come_back_by_their_id_and_errors_as_a_column(cluster: str, wanted: dict[str, str]) -> None:
    import ray

    run = load_run("demo", ["max_num_requests=4"])
    assert run.input is not None
    with Path(run.input.path).open() as stream:
        rows = [json.loads(line) for line, _ in zip(stream, range(8), strict=False)]
    asked = [{"id": row["id"], "question": row["question"]} for row in rows] + [{"id": "none", "question": None}]
    dataset = ray.data.from_items(asked).map_batches(DecodeRows, **map_options(load_profile("cpu"), run, replicas=2))
    found = {row["id"]: row for row in dataset.take_all()}
    assert {row["id"]: found[row["id"]]["text"] for row in rows} == {row["id"]: wanted[row["id"]] for row in rows}
    assert "give exactly one of prompt, messages, question" in found["none"]["error"]
    assert json.loads(found[rows[0]["id"]]["record"])["text"] == wanted[rows[0]["id"]]


@pytest.mark.parametrize(
    ("name", "variable", "wanted_ids"),
    [("h200_tp1_bp4", "CUDA_VISIBLE_DEVICES", {"0", "1"}), ("npu", "ASCEND_RT_VISIBLE_DEVICES", {"0,1", "2,3"})],
)
def test_actors_see_the_devices_of_their_replica(cluster: str, name: str, variable: str, wanted_ids: set[str]) -> None:
    import ray

    size = 1 if name != "npu" else 2
    profile = load_profile(name, [f"mesh.branch_parallel_size={size}"])

    @ray.remote(**ray_options(profile))
    class Sees:
        def devices(self) -> str | None:
            return os.environ.get(variable)

    actors = [Sees.remote(), Sees.remote()]
    assert set(ray.get([actor.devices.remote() for actor in actors])) == wanted_ids


def test_too_many_replicas_for_this_machine_are_a_sentence(tmp_path: Path) -> None:
    run = subprocess.run(
        command(tmp_path / "out.jsonl", "--ray", "local", "--replicas", "1000"),
        cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert run.returncode == 2
    assert "--replicas 1000 of profile cpu take 1000 CPU, and --ray local has" in run.stderr
    assert "Traceback" not in run.stderr


def test_an_address_where_no_cluster_is_is_a_sentence(tmp_path: Path) -> None:
    arguments = command(tmp_path / "out.jsonl", "--ray", "127.0.0.1:1")
    run = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert run.returncode == 2
    assert "--ray 127.0.0.1:1: no cluster can be joined there" in run.stderr
    assert "Traceback" not in run.stderr
