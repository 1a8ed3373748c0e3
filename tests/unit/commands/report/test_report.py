"""The page of a study: what it shows, and what it says where there is nothing to show."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from common.commands.main import app
from common.commands.report.page import html_page, markdown_page
from common.commands.report.sections import conclusion, conditions, sections
from common.commands.report.study import read_study
from common.commands.report.svg import ticks
from common.config import DecodeConfig, DeviceProfile, RunConfig
from common.errors import ConfigError
from common.evaluation import Board
from common.scoring import DEFINITIONS
from tests.unit.batch.batch_files import sweep_of


def test_every_section_has_its_picture_and_its_table(results: Path) -> None:
    study = read_study(results)
    found = {section.title: section for section in sections(study)}
    assert [title for title, section in found.items() if section.absent] == []
    for section in found.values():
        ElementTree.fromstring(section.picture)
        assert section.legend
    wins = found["Which branch won"].table
    assert wins is not None and wins[1][1] == ["2", "tau 0.8, k 7", "4", "4"]
    over_k = found["TPF over k"].table
    assert over_k is not None and [row[0] for row in over_k[1]] == ["skip_threshold 0.8", "skip_threshold 0.9"]
    assert found["TPF over k"].picture.count("<circle") == 4
    parts = found["Time of a step by part"]
    assert "layers 3.600 ms" in parts.picture and "the rest 0.200 ms" in parts.picture


def test_the_page_begins_with_what_came_out(results: Path) -> None:
    study = read_study(results)
    said = conclusion(study)
    assert said == (
        "tau 0.9, k 7 (TPF 4.50, accuracy 25.0 ± 21.7 %) fills the most tokens a pass without losing accuracy by more "
        "than the standard error; tau 0.8, k 0 (TPF 0.90, accuracy 25.0 ± 21.7 %) fills the fewest. The fastest by the "
        "clock is tau 0.8, k 0: 180.0 tokens per second of a request."
    )
    assert html_page(study).index(said) < html_page(study).index("<figure>")
    assert said in markdown_page(study).splitlines()[2]


def test_conditions_and_definitions_are_said_once(results: Path) -> None:
    study = read_study(results)
    lines = [*conditions(study.measured), DEFINITIONS["accuracy"], "NVIDIA", "the anchor, which holds"]
    for text in (html_page(study), markdown_page(study)):
        assert [text.count(line) for line in lines] == [1] * len(lines)


def test_a_line_joins_points_whose_bars_do_not_overlap(results: Path) -> None:
    board = json.loads((results / "sweep.json").read_text())
    for row, share in zip(board["rows"], (0.5, 0.58, 0.5, 0.62), strict=True):
        row["metrics"]["accuracy"] |= {"share": share, "standard_error": 0.05}
    (results / "sweep.json").write_text(json.dumps(board))
    picture = sections(read_study(results))[0].picture
    assert re.findall(r'<polyline class="line (\w+)"', picture) == ["c1"], "0.50 and 0.62, not 0.50 and 0.58"


def test_numbers_of_the_page_are_those_of_the_board(results: Path) -> None:
    rows = json.loads((results / "sweep.json").read_text())["rows"]
    page, text = html_page(read_study(results)), markdown_page(read_study(results))
    for row in rows:
        metrics = row["metrics"]
        cells = [
            f"{100 * metrics['accuracy']['share']:.1f} ± {100 * metrics['accuracy']['standard_error']:.1f} %",
            f"{metrics['tpf']['canvas']['per_request_mean']:.2f}",
            f"{metrics['tpf']['effective']['per_request_mean']:.2f}",
            f"{metrics['tps']['effective']['with_first_step']['mean']:.1f}",
        ]
        assert f"<td class=name>{row['name']}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) in page
        assert re.search(r"\| +" + r" \| +".join(map(re.escape, [row["name"], *cells])), text)


def test_the_page_needs_nothing_from_outside(results: Path) -> None:
    page = html_page(read_study(results))
    assert not re.findall(r"https?://|\b(?:src|href)=|<script|url\(|@import|\bstyle=", page)
    assert "default-src 'none'" in page


def test_what_results_hold_is_text_for_the_page(results: Path) -> None:
    board = json.loads((results / "sweep.json").read_text())
    board["rows"][0]["name"] = "<script>alert(1)</script>|`x`"
    (results / "sweep.json").write_text(json.dumps(board))
    assert "<script" not in html_page(read_study(results))
    assert "<script" not in markdown_page(read_study(results))


def test_what_failed_or_waits_is_said_at_the_top(results: Path) -> None:
    board = json.loads((results / "sweep.json").read_text())
    board["rows"][0] |= {"status": "failed", "error": "out of memory", "metrics": None}
    board["rows"][1] |= {"status": "waiting", "metrics": None}
    (results / "sweep.json").write_text(json.dumps(board))
    (results / "broken.metrics.json").write_text("{")
    page = html_page(read_study(results))
    assert "Failed: 1 tau 0.8, k 0: out of memory" in page
    assert "Not decoded yet: 2 tau 0.8, k 7" in page and "2 of 4 points measured" in page
    assert f"Cannot be read: {results}/broken.metrics.json" in page


def test_a_run_all_of_whose_requests_were_refused_is_said_at_the_top(results: Path) -> None:
    board = json.loads((results / "sweep.json").read_text())
    board["rows"][0]["metrics"]["requests"] |= {"finished": 0, "errors": 4}
    (results / "sweep.json").write_text(json.dumps(board))
    assert "1 tau 0.8, k 0: 4 of 4 requests were refused" in html_page(read_study(results))


def _changed(content: Any, keys: str, value: Any) -> str:
    """The JSON with one value replaced."""
    *folders, last = (int(key) if key.isdigit() else key for key in keys.split("."))
    inner = content
    for key in folders:
        inner = inner[key]
    inner[last] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("name", "keys", "value"),
    [
        ("sweep.json", "rows.0.metrics.tpf.effective", 5),
        ("sweep.json", "rows.0.metrics.accuracy", {"share": 0.5}),
        ("sweep.json", "rows", {}),
        ("single.metrics.json", "tpf.effective.per_request_mean", None),
        ("single.metrics.json", "tps.effective.with_first_step.max", None),
        ("single.metrics.json", "requests", []),
        ("single.metrics.json", "windows", {"wide": 3}),
        ("single.metrics.json", "windows", {"9": 10**400}),
        ("single.metrics.json", "run.decode.num_lookahead", []),
        ("sweep.json", "rows.0.decode.num_lookahead", 10**400),
        ("bench.json", "shapes.0.device_ms", "4.1"),
        ("bench.json", "steps.0.median_ms", {}),
        ("bench.json", "conditions", None),
    ],
)
def test_a_file_that_lacks_what_is_drawn_is_named_and_the_others_are_shown(
    results: Path, name: str, keys: str, value: Any
) -> None:
    folder = results.parent / "one"  # a sweep's folder has no single runs of its own
    folder.mkdir()
    (folder / "single.metrics.json").write_text((results / "tau-0.8-k-0.metrics.json").read_text())
    path = (folder if name.startswith("single") else results) / name
    path.write_text(_changed(json.loads(path.read_text()), keys, value))
    page = html_page(read_study(results.parent))
    assert f"Cannot be read: {path}" in page and page.count("<svg") > 3


def test_sections_without_data_say_so(results: Path) -> None:
    board = json.loads((results / "sweep.json").read_text())
    board["rows"] = board["rows"][:1]
    metrics = board["rows"][0]["metrics"]
    del metrics["wins_by_branch"], metrics["windows"]  # as an earlier version has written it
    metrics["accuracy"] = None
    (results / "sweep.json").write_text(json.dumps(board))
    (results / "bench.json").unlink()
    absent = {section.title: section.absent for section in sections(read_study(results))}
    assert absent == {
        "Accuracy over TPF": "No answer of this study was marked right or wrong.",
        "TPF over k": "No two settings of this study differ in num_lookahead alone.",
        "Tokens per second": "",
        "Which branch won": "The results of this study do not say which branch won.",
        "Windows": "The results of this study do not say how wide windows were.",
        "Time of a step by part": "No bench lies in this folder; "
        "scripts/bench.sh PROFILE RUN --output FOLDER/bench.json writes one.",
    }
    assert all(not text or text in html_page(read_study(results)) for text in absent.values())


def test_a_curve_of_one_point_has_no_area(results: Path) -> None:
    board = json.loads((results / "sweep.json").read_text())
    several = sections(read_study(results))[0]
    board["rows"] = board["rows"][:1]
    (results / "sweep.json").write_text(json.dumps(board))
    (results / "bench.json").unlink()
    one = sections(read_study(results))[0]
    assert "AUP" in several.meaning and "AUP" in str(several.legend)
    assert "AUP" not in one.meaning and "AUP" not in str(one.legend)
    assert one.picture and one.legend


def test_a_k_that_was_measured_is_in_the_tables_and_has_no_place_over_k(results: Path) -> None:
    board = json.loads((results / "sweep.json").read_text())
    board["rows"][0]["decode"]["num_lookahead"] = "auto"
    (results / "sweep.json").write_text(json.dumps(board))
    over_k = next(section for section in sections(read_study(results)) if section.title == "TPF over k")
    assert over_k.table is not None and [row[0] for row in over_k.table[1]] == ["skip_threshold 0.9"]
    assert "auto" in html_page(read_study(results))


def test_runs_of_a_folder_are_shown_beside_its_sweeps(results: Path) -> None:
    metrics = json.loads((results / "tau-0.8-k-0.metrics.json").read_text())
    (results.parent / "single.metrics.json").write_text(json.dumps(metrics))
    study = read_study(results.parent)
    assert [(series.name, len(series.points)) for series in study.series] == [("o", 4), ("single runs", 1)]
    assert [point.number for point in study.points] == [1, 2, 3, 4, 5]


def test_random_weights_are_named_where_their_numbers_are(results: Path) -> None:
    board = json.loads((results / "sweep.json").read_text())
    board["rows"][0]["metrics"]["run"]["load_format"] = "dummy"
    (results / "sweep.json").write_text(json.dumps(board))
    assert "random weights (texts and accuracy mean nothing)" in html_page(read_study(results))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: None, "no such folder or file"),
        (lambda folder: folder.mkdir(), "no results in it: expected a sweep.json"),
        (lambda folder: (folder.mkdir(), (folder / "sweep.json").write_text("[")), "sweep.json cannot be read"),
        (lambda folder: (folder.mkdir(), os.mkfifo(folder / "sweep.json")), "no results in it"),
    ],
)
def test_a_folder_without_results_is_one_sentence(tmp_path: Path, make: Any, sentence: str) -> None:
    make(tmp_path / "none")
    with pytest.raises(ConfigError, match=sentence):
        read_study(tmp_path / "none")


def test_the_command_writes_both_pages_beside_the_results(results: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(results)])
    assert done.exit_code == 0, done.output
    assert (results / "report.html").read_text().startswith("<!doctype html>")
    assert (results / "report.md").read_text().startswith("# o\n")
    assert read_study(results).points, "its own pages are no results"


def test_a_page_is_not_replaced_by_its_tables(results: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(results), "--output", str(results / "page.md")])
    assert isinstance(done.exception, ConfigError) and "go beside it: choose another name" in str(done.exception)
    assert not (results / "page.md").exists()


@pytest.mark.parametrize("name", ["o.jsonl", "sweep.json", "README.html"])
def test_a_page_replaces_pages_alone(results: Path, name: str) -> None:
    (results / "README.md").write_text("# Mine\n")
    (results / "o.jsonl").write_text('{"id": 1}\n')
    before = {path.name: path.read_bytes() for path in results.iterdir()}
    done = CliRunner().invoke(app, ["report", str(results), "--output", str(results / name)])
    assert isinstance(done.exception, ConfigError) and "another" in str(done.exception)
    assert {path.name: path.read_bytes() for path in results.iterdir()} == before


def test_a_board_that_is_being_written_to_can_be_reported(results: Path, cpu: DeviceProfile, run: RunConfig) -> None:
    sweep = sweep_of(cpu, run, {"tau 0.8, k 0": DecodeConfig(skip_threshold=0.8, num_lookahead=0)})
    Board(sweep).begin(sweep.points)
    assert [point.status for point in read_study(results).points] == ["waiting"]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.853, 0.921), (3, 3), (0, 0), (2.1, 12.4), (0, 2400), (-1e-9, 1e-9), (0, 1e6)]
)
def test_ticks_span_the_range_with_few_round_numbers(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 9
    steps = {round((b - a) / (found[1] - found[0]), 6) for a, b in itertools.pairwise(found)}
    assert steps == {1.0}


def test_conditions_say_what_was_asked_and_what_marked_it(results: Path) -> None:
    path = next(results.glob("*.metrics.json"))
    metrics = json.loads(path.read_text())
    metrics["run"]["input"] |= {"benchmark": "math", "apply_chat_template": True}
    metrics["accuracy"]["scored_by"] = {"sympy 1.14.0": 3, "sympy 1.13.3": 1}
    (results / "alone").mkdir()
    (results / "alone" / "a.metrics.json").write_text(json.dumps(metrics))
    page = html_page(read_study(results / "alone"))
    assert "benchmark math as a chat" in page and "marked by sympy 1.14.0 and by sympy 1.13.3" in page
