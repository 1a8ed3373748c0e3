"""Every shipped file means what it meant when `shipped_settings.json` was written: values that differ from the defaults
of that time, by the names of that time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from old_settings import flat, flat_profile

from common.config import DecodeConfig, DeviceProfile, load_profile, load_run, load_sweep

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SHIPPED = json.loads((Path(__file__).parent / "shipped_settings.json").read_text())
DECODE, PROFILE = SHIPPED["defaults"]["decode"], SHIPPED["defaults"]["profile"]


def check(decode: DecodeConfig, recorded: dict[str, Any]) -> None:
    assert flat(decode) == DECODE | recorded


def check_profile(profile: DeviceProfile, recorded: dict[str, Any]) -> None:
    if recorded.get("enforce_eager"):  # what is `graph.mode: eager` now
        recorded = {**recorded, "enforce_eager": False, "graph.mode": "eager"}
    assert flat_profile(profile) == PROFILE | recorded


def files(kind: str) -> list[Path]:
    found = sorted((CONFIGS / kind).glob("*.yaml"))
    assert [path.stem for path in found] == sorted(SHIPPED[kind]), "a file that comes or goes does so in the record too"
    return found


def test_defaults() -> None:
    check(DecodeConfig(), {})


@pytest.mark.parametrize("path", files("profiles"), ids=lambda path: path.stem)
def test_profile(path: Path) -> None:
    check_profile(load_profile(path), SHIPPED["profiles"][path.stem])


@pytest.mark.parametrize("path", files("runs"), ids=lambda path: path.stem)
def test_run(path: Path) -> None:
    check(load_run(path).decode, SHIPPED["runs"][path.stem])


@pytest.mark.parametrize("path", files("presets"), ids=lambda path: path.stem)
def test_preset(path: Path) -> None:
    check(DecodeConfig.model_validate(yaml.safe_load(path.read_text())["decode"]), SHIPPED["presets"][path.stem])


@pytest.mark.parametrize("path", files("sweeps"), ids=lambda path: path.stem)
def test_sweep(path: Path) -> None:
    """Files that name no profile or run are loaded over `cpu` and `demo`."""
    text, recorded = path.read_text(), SHIPPED["sweeps"][path.stem]
    sweep = load_sweep(path, None if "profile:" in text else "cpu", None if "run:" in text else "demo")
    assert [point.name for point in sweep.points] == [*recorded]
    for point in sweep.points:
        check(point.run.decode, recorded[point.name]["decode"])
        check_profile(point.profile.model_copy(update={"environment": {}}), recorded[point.name]["profile"])
