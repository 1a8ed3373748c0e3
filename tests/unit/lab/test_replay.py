"""Passes that were noted once are replayed at any load, and which setting the clock's table then calls the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.decoding import PassCosts
from scripts.lab.study.clock import careful, chosen, fastest, rights_of
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


RIGHT, WRONG = [True] * 100, [False] * 100
MATH = {
    "k = 0": RIGHT,
    "k = 0, hasty": [*RIGHT[:90], *WRONG[:10]],
    "LoPA, k = 3": RIGHT,
    "guarded": [*RIGHT[:99], False],
    "wrong": WRONG,
}
CODE = dict.fromkeys(MATH, RIGHT)
SPEED = {"k = 0": 10.0, "k = 0, hasty": 15.0, "LoPA, k = 3": 12.0, "guarded": 20.0, "wrong": 99.0}


def test_the_fastest_of_those_that_are_accurate_enough() -> None:
    assert careful(MATH) == "k = 0"
    assert fastest(MATH, SPEED) == "guarded"
    assert fastest({**MATH, "guarded": [*RIGHT[:98], False, False]}, SPEED) == "LoPA, k = 3"


def test_a_row_says_what_was_chosen_on_one_half_and_what_it_does_on_the_other() -> None:
    ((at_once, name, speed, over_plain, over_lopa, lost),) = chosen(MATH, CODE, {4: SPEED})
    assert (at_once, name, speed) == ("4", "guarded", 20.0)
    assert over_plain == pytest.approx(20 / 15), "k = 0, hasty errs on the other half only"
    assert over_lopa == pytest.approx(20 / 12)
    assert lost.startswith("-1.0 (")


def test_settings_with_other_problems_are_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"rows": [{"name": "k = 0"}, {"name": "b"}]}))
    (tmp_path / "k-0.jsonl").write_text('{"id": "1", "correct": true}\n{"id": "2"}\n')
    (tmp_path / "b.jsonl").write_text('{"id": "1", "correct": false}\n')
    with pytest.raises(ValueError, match="'b' has other problems than 'k = 0'"):
        rights_of(tmp_path)
    (tmp_path / "b.jsonl").write_text('{"id": "2", "correct": true}\n{"id": "1", "correct": false}\n')
    assert rights_of(tmp_path) == {"k = 0": [True, False], "b": [False, True]}
