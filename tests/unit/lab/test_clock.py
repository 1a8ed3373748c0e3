"""Which setting the clock's table calls the best at a load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.lab.study.clock import careful, chosen, fastest, rights_of

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
