"""The numbers of a run on examples small enough to compute by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from common.batch import print_summary
from common.decoding import Completion
from common.policies import registry
from common.scoring import DEFINITIONS, area_under_accuracy, fingerprint, request_record, summarize, summarize_start


def completion(effective: int, canvas: int, steps: int, total_s: float, first_s: float) -> Completion:
    return Completion(
        id="x",
        prompt_length=5,
        token_ids=tuple(range(effective)),
        canvas_token_ids=tuple(range(canvas)),
        num_canvas_tokens=canvas,
        num_forwards=steps,
        num_lookahead_wins=1,
        finish_reason="eos",
        first_step_s=first_s,
        total_s=total_s,
    )


def record(*numbers: Any, **extra: Any) -> dict[str, Any]:
    return {**request_record("x", "text", completion(*numbers)), **extra}


def test_a_record_counts_canvas_and_effective_tokens_with_and_without_the_first_step() -> None:
    found = record(30, 40, 10, 2.0, 0.5)
    assert (found["tpf_effective"], found["tpf_canvas"]) == (3.0, 4.0)
    assert (found["tps_effective"], found["tps_canvas"]) == (15.0, 20.0)
    # The first step's time is left out, its tokens are not.
    assert found["tps_effective_without_first_step"] == 30 / 1.5
    assert found["tps_canvas_without_first_step"] == 40 / 1.5


def test_a_request_of_one_step_has_no_speed_without_its_first_step() -> None:
    found = record(8, 8, 1, 0.5, 0.5)
    assert found["tps_effective_without_first_step"] is None
    assert summarize([found])["tps"]["effective"]["without_first_step"] == {
        "mean": None,
        "max": None,
        "top10_mean": None,
    }


def test_wins_and_windows_are_counted_and_the_prompts_step_is_no_window() -> None:
    steps = {"winner_per_step": (0, 2, 2, 1), "window_per_step": (300, 16, 32, 32)}
    found = request_record("x", "", replace(completion(30, 40, 4, 2.0, 0.5), **steps))
    assert (found["wins_by_branch"], found["windows"]) == ([1, 1, 2], {"16": 1, "32": 2})
    earlier = record(30, 40, 4, 2.0, 0.5)  # of a version that did not count them
    del earlier["wins_by_branch"], earlier["windows"]
    one_branch = {**earlier, "wins_by_branch": [5], "windows": {"128": 5}}
    metrics = summarize([found, one_branch, earlier])
    assert metrics["wins_by_branch"] == [6, 1, 2]
    assert list(metrics["windows"].items()) == [("16", 1), ("32", 2), ("128", 5)]


def test_means_of_ratios_and_ratios_of_sums_are_told_apart() -> None:
    metrics = summarize([record(10, 10, 10, 1.0, 0.1), record(90, 120, 10, 3.0, 0.1)])
    assert metrics["tpf"]["effective"] == {"per_request_mean": (1 + 9) / 2, "total": 100 / 20}
    assert metrics["tpf"]["canvas"] == {"per_request_mean": (1 + 12) / 2, "total": 130 / 20}
    assert metrics["tps"]["effective"]["with_first_step"] == {"mean": 20.0, "max": 30.0, "top10_mean": 20.0}
    assert metrics["latency_s"] == {"mean": 2.0, "max": 3.0}
    assert metrics["steps"]["mean"] == 10
    assert metrics["tokens"] == {"prompt": 10, "canvas": 130, "effective": 100}
    assert metrics["lookahead_win_share"] == 2 / 20


def test_the_top_ten_are_the_fastest_ten() -> None:
    metrics = summarize([record(speed, speed, 2, 1.0, 0.1) for speed in range(1, 21)])
    assert metrics["tps"]["effective"]["with_first_step"]["top10_mean"] == sum(range(11, 21)) / 10


def test_errors_are_counted_and_enter_no_mean() -> None:
    metrics = summarize([record(10, 10, 5, 1.0, 0.1), {"id": 7, "error": "too long"}])
    assert metrics["requests"] == {"finished": 1, "errors": 1, "finish_reasons": {"eos": 1}}
    assert metrics["tpf"]["effective"]["per_request_mean"] == 2.0


def test_accuracy_comes_with_its_standard_error_and_by_kind() -> None:
    scored = [record(1, 1, 1, 1.0, 1.0, correct=right, kind=kind) for right, kind in _ANSWERS]
    accuracy = summarize([*scored, record(1, 1, 1, 1.0, 1.0)])["accuracy"]
    assert (accuracy["correct"], accuracy["scored"], accuracy["share"]) == (3, 4, 0.75)
    assert accuracy["standard_error"] == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert accuracy["by_kind"]["code"]["share"] == 0.5
    assert accuracy["by_kind"]["math"]["share"] == 1.0


_ANSWERS = [(True, "math"), (True, "math"), (True, "code"), (False, "code")]


def test_nothing_scored_is_no_accuracy_and_nothing_finished_no_numbers() -> None:
    assert summarize([record(1, 1, 1, 1.0, 1.0)])["accuracy"] is None
    metrics = summarize([{"id": 1, "error": "x"}])
    assert metrics["tpf"]["canvas"] == {"per_request_mean": None, "total": None}
    for details in (False, True):
        print_summary("a run without results", metrics, details=details)


def test_the_aggregate_is_tokens_over_the_wall_time_of_this_start() -> None:
    start = summarize_start([record(30, 40, 2, 9.0, 0.1), record(10, 20, 2, 9.0, 0.1), {"id": 1, "error": ""}], 4.0)
    assert start["tps_aggregate"] == {"canvas": 15.0, "effective": 10.0}
    assert (start["requests"], start["errors"], start["wall_s"]) == (2, 1, 4.0)


def setting(tpf: float, share: float) -> dict[str, Any]:
    return {"tpf": {"effective": {"per_request_mean": tpf}}, "accuracy": {"share": share}}


def test_the_area_under_accuracy_weighs_losses_and_leaves_out_large_ones() -> None:
    # Equal accuracies: weight 1, so the area is accuracy times TPF.
    assert area_under_accuracy([setting(6.0, 0.8), setting(2.0, 0.8)]) == pytest.approx(480)
    assert area_under_accuracy([setting(2.0, 0.8), setting(6.0, 0.7)]) == pytest.approx(160)  # 10 points lost
    weight = math.exp(-3 * (1 - 0.78 / 0.8))
    expected = 160 + (6 - 2) * (80 + 78 * weight) / 2
    assert area_under_accuracy([setting(2.0, 0.8), setting(6.0, 0.78)]) == pytest.approx(expected)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        [setting(2.0, 0.8)],
        [setting(2.0, 0.8), setting(2.0, 0.6)],
        [setting(2.0, 0.8), {**setting(4.0, 0.0), "accuracy": None}],
    ],
)
def test_there_is_no_area_without_two_scored_settings_that_differ_in_tpf(settings: list[dict[str, Any]]) -> None:
    assert area_under_accuracy(settings) is None


def test_every_printed_section_has_a_definition(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary("title", summarize([record(30, 40, 10, 2.0, 0.5, correct=True)]), details=True)
    printed = " ".join(capsys.readouterr().out.split())
    names = {"canvas": "canvas", "effective": "effective", "tpf": "TPF", "tps": "TPS"}
    for key, name in {**names, "without_first_step": "without first step", "latency_s": "latency"}.items():
        assert f"{name}: {' '.join(DEFINITIONS[key].split())}" in printed
    assert "_" not in printed
    assert "accuracy 100.0 ± 0.0 % (1 of 1)" in printed


def test_numbers_say_which_packages_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point(NamedTuple):
        dist: Any

    class Dist(NamedTuple):
        name: str
        version: str

    installed = {"fill_rules": {"mine": Point(Dist("other", "1.2"))}}
    monkeypatch.setattr(registry, "_installed", lambda folder: installed.get(folder, {}))
    found = fingerprint()
    assert found["policies"] == {"fill_rules.mine": "other 1.2"}
    assert found["torch"] and found["tokenizers"] and "triton" in found
