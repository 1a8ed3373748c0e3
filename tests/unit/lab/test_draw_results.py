"""The README's picture is that of the measurements in docs/results."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from draw_results import ROOT, THEMES, Theme, draw


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_the_pictures_are_those_of_the_result_files(theme: Theme) -> None:
    picture = ROOT / "docs" / "pictures" / f"results_{theme.name}.svg"
    drawn = draw(ROOT / "docs" / "results", theme)
    assert picture.read_text(encoding="utf-8") == drawn, "run python scripts/lab/draw_results.py"
    ElementTree.fromstring(drawn)
    assert not [variable for variable in ("var(", "{", "None") if variable in drawn.split("</style>")[1]]
