"""A batch run whose engines are elsewhere, with a local engine in the place of Ray: what this process asks of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.batch import run_batch
from common.cluster import batch
from common.config import load_profile, load_run
from common.decoding import Completion, GenerationRequest, Rejection
from common.errors import ConfigError
from common.generate import build_generator


@pytest.mark.slow
def test_its_records_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(profile: Any, run: Any, _: int, requests: Iterable[GenerationRequest]) -> Iterator[Any]:
        with build_generator(profile, run) as generator:
            results: list[Completion | Rejection] = list(generator.generate(requests))
        yield from results

    for name in ("require_ray", "_join", "_check_resources"):
        monkeypatch.setattr(batch, name, lambda *_: None)
    monkeypatch.setattr(batch, "_decoded", decoded)
    monkeypatch.setattr(batch, "_described", lambda replicas: {"ray_replicas": replicas})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(shutdown=lambda: None))
    lines = [{"id": 0, "question": "Tom has 3 apples and buys 5 more. How many apples does he have now?"}]
    lines.append({"id": 1, "question": "long " * 2000})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    for name in ("one", "elsewhere"):
        output = tmp_path / f"{name}.jsonl"
        run = load_run("demo", [f"input.path={tmp_path / 'in.jsonl'}", f"output.path={output}", "max_num_requests=2"])
        if name == "one":
            run_batch(load_profile("cpu"), run, partial(build_generator, load_profile("cpu"), run))
        else:
            metrics = batch.run_on_ray(load_profile("cpu"), run, "local", 2)
            assert metrics is not None and metrics["environment"]["ray_replicas"] == 2
        records = [json.loads(line) for line in output.read_text().splitlines()]
        found.append({record["id"]: record.get("text", record.get("error")) for record in records})
    assert found[0] == found[1] and found[0].keys() == {0, 1} and "5" in found[0][0]


def test_what_they_cannot_do_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "require_ray", lambda: None)
    with pytest.raises(ConfigError, match="replicas on Ray decode and tell no likelihoods"):
        batch.run_on_ray(load_profile("cpu"), load_run("demo", ["input.target_field=answer"]), "local", 2)
