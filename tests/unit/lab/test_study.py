"""The study's numbers: from result files to the page, and from nowhere else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import ScriptedGenerator

from common.config import DeviceProfile, InputConfig, RunConfig
from common.errors import ConfigError
from scripts.lab import tables
from scripts.lab.study import foresight, given, page
from scripts.lab.study.bootstrap import difference, gain, paired_interval

ROOT = Path(__file__).parents[3]


def result_folder(tmp_path: Path, rights: dict[str, list[bool]], speeds: dict[str, list[float]]) -> Path:
    folder = tmp_path / "demo" / "study_lookahead"
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(rights):
        pairs = list(zip(rights[name], speeds[name], strict=True))
        lines = [json.dumps({"id": n, "correct": right, "tpf_effective": tpf}) for n, (right, tpf) in enumerate(pairs)]
        lines.append(json.dumps({"id": 99, "error": "too long"}))
        (folder / f"k-{number}-tau-0.9.jsonl").write_text("\n".join(lines) + "\n")
        tpf = {"per_request_mean": float(np.mean(speeds[name]))}
        metrics = {
            "accuracy": {"correct": sum(rights[name]), "standard_error": 0.1},
            "tpf": {"effective": tpf, "canvas": tpf}, "steps": {"mean": 5.0}, "rows_per_step": 2.0,
            "requests": {"finished": len(pairs)}, "environment": {"device": "cpu", "host": "unnamed"},
            "run": {"max_num_requests": 1}, "latency_s": {"mean": 0.02},
        }  # fmt: skip
        rows.append({"name": name, "status": "done", "metrics": metrics})
    rows.append({"name": "k = 7, tau 0.9", "status": "failed", "metrics": None})
    (folder / "sweep.json").write_text(json.dumps({"rows": rows}))
    return tmp_path


def test_points_are_compared_problem_by_problem_with_their_base(tmp_path: Path) -> None:
    rights = {"k = 0, tau 0.9": [True, True, False, True], "k = 1, tau 0.9": [True, True, True, True]}
    speeds = {"k = 0, tau 0.9": [2.0, 4.0, 3.0, 3.0], "k = 1, tau 0.9": [4.0, 8.0, 6.0, 6.0]}
    section = page.collect(result_folder(tmp_path, rights, speeds))["demo/study_lookahead"]
    assert section["base"] == "k = 0, tau 0.9" and section["environment"] == {"device": "cpu"}
    assert [row["name"] for row in section["rows"]] == list(rights), "the failed one has no numbers"
    base, other = section["rows"]
    assert "gain" not in base and other["gain"] == [1.0, 1.0, 1.0], "twice as many for every problem, so for any"
    value, low, high = other["accuracy_gain"]
    assert value == 0.25 and low == 0.0 < high
    table = page.table(section)
    assert "| k = 1, tau 0.9 | 100.0 ± 10.0 | +25.0" in table
    assert "| ms a step |" in table and table.splitlines()[-1].endswith("| 4.00 |"), "20 ms and 5 steps a request"


def test_an_interval_holds_what_was_measured_and_shrinks_with_more_problems() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.normal(10, 3, 400), rng.normal(8, 3, 400)
    few, many = (paired_interval(first[:count].tolist(), second[:count].tolist(), gain) for count in (25, 400))
    for found in (few, many):
        assert found.low < found.value < found.high
    assert many.high - many.low < (few.high - few.low) / 2
    same = paired_interval([1.0, 5.0], [1.0, 5.0], difference)
    assert same == (0, 0, 0)
    with pytest.raises(ValueError, match="3 and 2 numbers"):
        paired_interval([1, 2, 3], [1, 2], difference)


@pytest.mark.parametrize(
    ("second", "expected"),
    [([10, 20, 30, 40], 1), ([4, 3, 2, 1], -1), ([1, 1, 2, 2], 0.894427), ([5, 5, 5, 5], None), ([2, 1, 4, 3], 0.6)],
)
def test_rank_correlation(second: list[float], expected: float | None) -> None:
    assert foresight.rank_correlation([1, 2, 3, 4], second) == pytest.approx(expected)


def test_parts_that_are_no_sweeps_have_tables_too(tmp_path: Path) -> None:
    mean = {"worst": 5.0, "mean": 8.0, "best": 11.0, "lopa": 10.0, "no_lookahead": 4.0, "percentile": 0.9,
            "right": 0.5, "lopa_right": 1.0}  # fmt: skip
    orders = {"problems": 3, "orders": 7, "num_lookahead": 7, "mean": mean, "rows": [1, 2, 3]}
    over_time = {f"tokens_of_{span}_steps": 0.1 * span for span in (1, 2, 3)}
    foreseen = {"problems": 4, "steps": 40, "among_branches": {"mean_rank_correlation": -0.25}, "over_time": over_time}
    (tmp_path / "part_orders_demo.json").write_text(json.dumps(orders))
    (tmp_path / "part_foresight_demo.json").write_text(json.dumps(foreseen))
    found = page.tables(page.collect(tmp_path))
    assert found["part_orders_demo"].endswith("| 3, 7 | 5.00 | 8.00 | 11.00 | 10.00 | 4.00 | 90 % | 50 %, 100 % |\n")
    assert found["part_foresight_demo"].endswith("| 4, 40 | -0.25 | +0.10 | +0.20 | +0.30 |\n")


@pytest.mark.slow
def test_random_orders_and_foresight_on_the_shipped_model() -> None:
    from scripts.lab.study import orders

    options = given.parser("").parse_args(["--out", "unused", "--problems", "2"])
    with given.load(options) as generator:
        found = orders.study(generator, 2, num_orders=3)
        seen = foresight.study(generator, 3)
    assert found["mean"]["worst"] <= found["mean"]["mean"] <= found["mean"]["best"]
    assert found["mean"]["lopa"] > found["mean"]["no_lookahead"]
    assert seen["among_branches"]["mean_rank_correlation"] > 0.3, "a surer branch fills more"
    assert sum(1 for part in seen["calibration"]) == 10


def posing(tmp_path: Path, cpu: DeviceProfile, *lines: dict[str, Any]) -> Any:
    """A scripted model, of which a token is a character, that is asked these lines."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = InputConfig(path=str(path), prompt_template="{}: {items}?")
    return ScriptedGenerator(cpu, RunConfig(model="m", input=source))


def test_the_parts_of_the_study_ask_what_a_batch_run_asks(tmp_path: Path, cpu: DeviceProfile) -> None:
    generator = posing(tmp_path, cpu, {"items": "a"}, {"items": ["b", "{c}"]}, {"items": "d"})
    posed = given.problems(generator.run, 2)
    asked = given.requests(generator, posed, [0, 5])
    texts = [generator.tokenizer.decode(list(request.prompt)) for request in asked]
    assert texts == ["{}: a?", "{}: b\n{c}?"] * 2
    assert [(request.id, request.seed) for request in asked] == [("0/0", 0), ("1/0", 0), ("0/5", 5), ("1/5", 5)]


def test_a_problem_without_a_prompt_is_named(tmp_path: Path, cpu: DeviceProfile) -> None:
    generator = posing(tmp_path, cpu, {"items": "a"}, {"id": "x", "answer": "b"})
    with pytest.raises(ConfigError, match=r"in.jsonl: problem x: line 2: give exactly one of prompt, messages"):
        given.requests(generator, given.problems(generator.run, 2), [0])
    with pytest.raises(ConfigError, match="the run has no input"):
        given.problems(RunConfig(model="m"), 2)


# A Python that is one for the study's own step and stands still in the place of a sweep or a part.
PRETENDER = """#!/usr/bin/env bash
case "$*" in
-c*) ;;
"-m scripts.lab.study.child "*) exec {python} "$@" ;;
*) echo $$ >{started}; exec sleep 1000 ;;
esac
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process is told of its parent's end on Linux only")
@pytest.mark.parametrize(("signal_number", "exit_code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)])
def test_what_the_study_has_started_ends_with_it(tmp_path: Path, signal_number: int, exit_code: int) -> None:
    pretender, started = tmp_path / "python", tmp_path / "started"
    pretender.write_text(PRETENDER.format(python=sys.executable, started=started))
    pretender.chmod(0o755)
    command = [str(ROOT / "scripts/lab/study.sh"), "cpu", "--reduced", str(tmp_path / "out")]
    study = subprocess.Popen(command, env={**os.environ, "PYTHON": str(pretender)})
    until(lambda: started.exists() and started.read_text().endswith("\n"))
    child = int(started.read_text())
    try:
        assert is_running(child)
        study.send_signal(signal_number)
        assert study.wait(timeout=240) == exit_code
        until(lambda: not is_running(child))
    finally:
        if is_running(child):
            os.kill(child, signal.SIGKILL)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, "it took more than two minutes"
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Whether it runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_first_table_sets_both_kinds_of_problems_side_by_side() -> None:
    def section(base: str, accuracy: float) -> dict[str, Any]:
        names = ("d2f, tau 0.98", "d2f, tau 0.95", "LoPA, k = 3", "LoPA, k = 7", "k = 7, random winner")
        rows = [
            {"name": name, "requests": 100, "correct": round(100 * accuracy) - number, "standard_error": 0.02,
             "tpf_effective": 3.0 + number, "steps": 9.0, "rows_per_step": 1.0}
            for number, name in enumerate(names)
        ]  # fmt: skip
        return {"base": base, "rows": rows}

    study = {"demo/table": section("d2f, tau 0.98", 0.9), "demo_code/table": section("d2f, tau 0.95", 0.8)}
    lines = tables.front({"study": study}).splitlines()
    assert lines[2] == "| most accurate without lookahead | 90.0 ± 2.0 % | 3.00 | 79.0 ± 2.0 % | 4.00 |"
    assert lines[5] == "| LoPA, k = 7 | 87.0 ± 2.0 % | 6.00 | 77.0 ± 2.0 % | 6.00 |"
    assert len(lines) == 7


def test_two_sections_stand_side_by_side_with_the_settings_of_both() -> None:
    def row(name: str, correct: int, **more: Any) -> dict[str, Any]:
        return {"name": name, "requests": 10, "correct": correct, "standard_error": 0.1, "tpf_effective": 2.5,
                "rows_per_step": 1.0, **more}  # fmt: skip

    math = {"base": "k = 0", "rows": [row("k = 0", 8), row("k = 7", 9, accuracy_gain=[0.1, 0.0, 0.2]), row("own", 1)]}
    code = {"base": "k = 7", "rows": [row("k = 7", 7), row("k = 0", 6, accuracy_gain=[-0.1, -0.3, 0.1])]}
    study = {"demo/sweep": math, "demo_code/sweep": code, "demo/alone": math}
    found = tables.side_by_side(study)
    assert list(found) == ["math_and_code/sweep"]
    assert found["math_and_code/sweep"].splitlines()[2:] == [
        "| k = 0 | 80.0 ± 10.0 | base | 2.50 | 60.0 ± 10.0 | -10.0 (-30.0 to +10.0) | 2.50 | 1.0, 1.0 |",
        "| k = 7 | 90.0 ± 10.0 | +10.0 (+0.0 to +20.0) | 2.50 | 70.0 ± 10.0 | base | 2.50 | 1.0, 1.0 |",
    ]
