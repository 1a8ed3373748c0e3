"""The pages' pictures and predictions are those of the result files in docs/results."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import draw_answer
import pytest
from draw_results import ROOT, THEMES, Theme, draw, read

from scripts.lab import estimate_ascend, soak_page
from scripts.lab.tables import RESULTS


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_the_pictures_are_those_of_the_result_files(theme: Theme) -> None:
    picture = ROOT / "docs" / "pictures" / f"results_{theme.name}.svg"
    drawn = draw(ROOT / "docs" / "results", theme)
    assert picture.read_text(encoding="utf-8") == drawn, "run python scripts/lab/draw_results.py"
    ElementTree.fromstring(drawn)
    assert not [variable for variable in ("var(", "{", "None") if variable in drawn.split("</style>")[1]]


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_the_moving_picture_is_that_of_the_recorded_answer(theme: Theme) -> None:
    picture = ROOT / "docs" / "pictures" / f"answer_{theme.name}.svg"
    answer = json.loads((ROOT / "docs" / "results" / "answer.json").read_text(encoding="utf-8"))
    drawn = draw_answer.draw(answer, theme)
    assert picture.read_text(encoding="utf-8") == drawn, "run python scripts/lab/draw_answer.py"
    ElementTree.fromstring(drawn)


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_the_soaks_picture_is_that_of_its_result_file(theme: Theme) -> None:
    picture = ROOT / "docs" / "pictures" / f"soak_cpu_{theme.name}.svg"
    drawn = soak_page.draw(read(ROOT / "docs" / "results" / "soak_cpu.json"), theme)
    assert picture.read_text(encoding="utf-8") == drawn, (
        "run python -m scripts.lab.soak_page docs/results/soak_cpu.json"
    )
    ElementTree.fromstring(drawn)


def test_an_answers_end_and_what_follows_it_are_left_out() -> None:
    event = {"prompt_length": 5, "num_won": 1, "filled": [[6, 1, "b", -0.5], [5, 2, "a", 0.0], [7, 3, "<end>", 0.0]]}
    trace = {"model": "m", "prompt": "p", "settings": {"num_lookahead": 3}, "answer": {"length": 3}, "events": [event]}
    assert draw_answer.answer_of(trace)["passes"] == [[[0, "a", False], [1, "b", True]]]


@pytest.mark.slow
def test_the_result_file_is_what_the_estimate_says() -> None:
    kept = json.loads((RESULTS / "estimate_ascend.json").read_text(encoding="utf-8"))
    made = estimate_ascend.made()["tables"]
    assert kept["tables"].keys() == made.keys()
    for name, table in made.items():
        assert kept["tables"][name]["columns"] == table["columns"], "run python -m scripts.lab.estimate_ascend"
        for old, new in zip(kept["tables"][name]["rows"], table["rows"], strict=True):
            near = [pytest.approx(cell, rel=1e-6) if isinstance(cell, float) else cell for cell in new]
            assert old == near, "run python -m scripts.lab.estimate_ascend"
