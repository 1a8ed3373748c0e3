"""The predictions on the pages are those of the estimate as it is."""

from __future__ import annotations

import json

import pytest

from scripts.lab import estimate_ascend
from scripts.lab.tables import RESULTS


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
