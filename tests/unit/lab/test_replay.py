"""Passes that were noted once are replayed at any load, by times that were measured at others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.decoding import PassCosts
from scripts.lab.study.replay import (
    LOADS,
    Answer,
    largest_miss,
    measured_too,
    pass_times,
    read,
    replayed,
    speed,
    table_of,
)

TWO = [Answer(True, 8, [10, 30]), Answer(False, 4, [20])]
MEASURED = {
    "tables": {
        "methods": {
            "columns": [["setting", ""], *[[f"tokens/s, {load} at once", ""] for load in LOADS]],
            "rows": [["k = 0", 12.0, 24.0, None, None], ["elsewhere", 1.0, 1.0, 1.0, 1.0]],
        }
    }
}


def test_a_pass_takes_as_long_as_its_tokens_say() -> None:
    times = PassCosts([10, 30], [1.0, 3.0])
    assert [times.at(tokens) for tokens in (5, 20, 40)] == [1.0, 2.0, 4.0]
    replay = replayed(TWO, 1, times)
    assert replay.num_passes == 4 * 3  # two answers four times over
    assert replay.filled == pytest.approx(4 * 8 + 4 * 4)
    assert replay.computed == 12 * 20 and replay.seconds == pytest.approx(12 * 2)
    assert speed(TWO, 1, times) == pytest.approx(2)
    at_four = replayed(TWO, 4, None)
    assert at_four.computed / at_four.num_passes > 3 * 20 and at_four.seconds == at_four.num_passes


def test_what_passes_took_follows_from_the_settings_that_were_measured_too() -> None:
    measured = measured_too({"k = 0": TWO}, MEASURED)
    assert [(one.at_once, one.tokens_per_s) for one in measured] == [(1, 12.0), (4, 24.0)]
    times = pass_times({"k = 0": TWO}, measured)
    assert times.tokens[0] == pytest.approx(20) and times.seconds[0] == pytest.approx(4 / 12)
    assert len(times.tokens) == 2 and times.seconds == sorted(times.seconds)
    assert speed(TWO, 1, times) == pytest.approx(12, rel=0.1)
    assert 0 < largest_miss({"k = 0": TWO}, measured, times) < 0.2


def test_a_row_compares_a_setting_with_the_others_problem_by_problem(tmp_path: Path) -> None:
    names = ("k = 0", "LoPA, k = 3", "LoPA, k = 7")
    for name, slug in zip(names, ("k-0", "lopa-k-3", "lopa-k-7"), strict=True):
        more = [Answer(True, 1, [1])] * (name != "k = 0")
        (tmp_path / f"{slug}.json").write_text(json.dumps({"name": name, "answers": [*TWO, *more]}))
    answers = read(tmp_path, names)
    assert {len(own) for own in answers.values()} == {2}, "the problems that all have"
    rows = table_of(answers, PassCosts([1, 2], [1, 2]))
    assert rows[0][:3] == ["k = 0", 50.0, None]
    assert rows[1][2] == "+0.0 (+0.0 to +0.0)" and rows[1][3] is None
    assert rows[0][5:7] == [pytest.approx(12 / 3), pytest.approx(12 / 60)]
