"""`lopa bench`: what can be measured, sentences for what cannot, and where results go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.bench import HostOptions, LoadOptions, measure_host, measure_marking
from common.bench.host import FAMILIES
from common.bench.load import LoadResult
from common.commands.bench import MEASURES, host
from common.commands.main import app
from common.config import DeviceProfile, RunConfig
from common.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def said(*arguments: str) -> str:
    """The sentence with which `lopa bench` ends."""
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(done.exception, ConfigError), done.output
    return str(done.exception)


def test_help_names_all_that_can_be_measured() -> None:
    done = CliRunner().invoke(app, ["bench", "--help"])
    assert done.exit_code == 0 and all(f"\n  {name} " in done.output for name in MEASURES)
    assert CliRunner().invoke(app, ["bench"]).exit_code == 2


def test_a_model_alone_is_measured_by_its_steps() -> None:
    assert said("nothing").startswith("nothing: no such file or folder, and not one of the runs in")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("load", "-p", "cpu", "demo", "--http"),
            "--http is for a model whose answers another one gives: add --answers RUN",
        ),
        (("load", "-p", "cpu", "demo", "--lookahead", "3"), "--lookahead is for a model whose answers"),
        (("load", "-p", "cpu", "demo", "--answers", "demo", "--limit", "3"), "leave out --limit"),
        (
            ("load", "-p", "cpu", "demo", "--answers", "demo", "--http", "--lookahead", "balanced"),
            "--lookahead takes numbers: a pace is set by",
        ),
        (("load", "-p", "cpu", "demo", "--output", "."), "is a folder: name a file in it"),
        (("load", "-p", "cpu", "nothing"), "not one of the runs in"),
        (("load", "-p", "h200_tp1_bp4", "demo"), "one process"),
    ],
)
def test_what_a_load_cannot_be_measured_with_is_said(arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in said(*arguments)


@pytest.mark.parametrize("engine", [None, "lopa_cuda", "lopa_ascend"])
def test_the_hosts_part_is_measured_for_each_engine(engine: str | None) -> None:
    options = HostOptions(num_lookahead=3, num_requests=2, num_steps=3, engine=engine, num_ranks=2)
    lines = measure_host(options).splitlines()
    assert lines[0].startswith("dream, k=3, 2 requests, mean window ") and lines[1].startswith("scheduler: median ")
    assert [line.split(":")[0] for line in lines[2:]] == ([f"{engine} before the launch"] if engine else [])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scheduler_is_measured_for_each_family(family: str) -> None:
    parsed = host.parse(["--family", family, "--requests", "1", "--steps", "2", "--num-lookahead", "3"])
    lines = measure_host(HostOptions(3, num_steps=parsed.steps, family=parsed.family)).splitlines()
    assert lines[0].startswith(f"{family}, k=3, 1 request, ") and len(lines) == 2


def test_marking_is_measured_beside_a_bare_interpreter() -> None:
    first, second = measure_marking(1).splitlines()
    assert "median " in first and second.startswith("bare interpreter: median ")


def demo(*options: str) -> list[str]:
    return ["bench", "load", "-p", "cpu", "demo", *options, "--set", "decode.max_new_tokens=32"]


@pytest.mark.slow
def test_a_load_of_the_runs_own_model_is_decoded_twice(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    done = CliRunner().invoke(app, demo("--at-once", "2", "--limit", "3", "--output", str(out)))
    assert done.exit_code == 0, done.exception
    (row,) = json.loads(out.read_text())["loads"]
    assert row["at_once"] == 2 and row["first_tps"] > 0 and row["second_tps"] > 0 and row["engine"] == "lopa_cuda"
    assert "tokens/s, second run" in done.stdout


@pytest.mark.slow
def test_a_load_is_measured_with_another_models_answers(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    options = ("--answers", "demo", "--at-once", "2", "--lookahead", "balanced", "--output", str(out))
    done = CliRunner().invoke(app, demo(*options))
    assert done.exit_code == 0, done.exception
    result = json.loads(out.read_text())
    assert [(load["at_once"], load["setting"]) for load in result["loads"]] == [(2, "balanced")]
    assert all(load["tokens_per_s"] > 0 for load in result["loads"]) and result["floors"]["bytes_per_s"] > 0


def test_weights_that_are_named_are_those_of_the_timed_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[RunConfig] = []

    def measure(profile: DeviceProfile, run: RunConfig, answers: RunConfig, options: LoadOptions) -> LoadResult:
        taken.extend((run, answers))
        return LoadResult("", [])

    monkeypatch.setattr("common.bench.measure_throughput", measure)
    settings = ("model=configs/models/sdar_4b", "load_format=dummy", "decode.block_size=8")
    given = [part for setting in settings for part in ("--set", setting)]
    done = CliRunner().invoke(app, ["bench", "load", "-p", "cpu", "dream_7b_dummy", *given, "--answers", "demo"])
    assert done.exit_code == 0, done.output
    timed, answering = taken
    assert timed.model.endswith("sdar_4b") and timed.load_format == "dummy"
    assert answering.model.endswith("demo") and answering.load_format == "auto"
    assert timed.decode.block_size == answering.decode.block_size == 8
