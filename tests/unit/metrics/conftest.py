"""Programs that are to end well get the time that a busy machine takes for them."""

from __future__ import annotations

import pytest

from common.metrics import programs


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "TIME_LIMIT_S", 20.0)
    monkeypatch.setattr(programs, "START_LIMIT_S", 20.0)
