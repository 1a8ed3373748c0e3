from __future__ import annotations

from pathlib import Path

import pytest

from common.config import InputConfig, OutputConfig, RunConfig


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    source, target = InputConfig(path=str(tmp_path / "in.jsonl")), OutputConfig(path=str(tmp_path / "out" / "o.jsonl"))
    return RunConfig(model="m", input=source, output=target)
