"""Every shipped file means what it meant when `shipped_settings.json` was written: values that differ from the defaults
of that time, by the names of that time. docs/settings.md has all that the models check."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from old_settings import flat, flat_profile
from write_settings import PAGE, SECTIONS, page

from common.config import DecodeConfig, DeviceProfile, Frozen, load_profile, load_run, load_sweep
from common.config.frozen import Settings
from common.config.strategies import Strategy
from common.policies import shipped

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


def every_model(model: type[Frozen] = Frozen) -> set[type[Frozen]]:
    """Return all models of settings; other rooms have frozen objects of their own."""
    below = [found for own in model.__subclasses__() for found in every_model(own)]
    return {found for found in (model, *below) if found.__module__.startswith("common.config.")} - {
        Frozen,
        Settings,
        Strategy,
    }


def test_the_page_is_what_the_script_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python scripts/write_settings.py"


def test_the_text_of_the_fill_rule_describes_every_one_that_ships() -> None:
    text = DecodeConfig.model_fields["fill_rule"].description or ""
    assert [name for name in shipped("fill_rules") if f"`{name}`" not in text] == []


def test_no_settings_file_has_a_section_that_the_page_leaves_out() -> None:
    assert {model for _, model in SECTIONS} == every_model()


@pytest.mark.parametrize("model", sorted(every_model(), key=lambda model: model.__name__))
def test_every_key_is_explained_in_one_sentence(model: type[Frozen]) -> None:
    assert model.__doc__
    for name, field in model.model_fields.items():
        if name == "name" and issubclass(model, Strategy):
            continue
        described = field.description or ""
        assert described.endswith("."), f"{model.__name__}.{name} needs a description"
        assert not re.search(r"[.!?] [A-Z]", described), f"{model.__name__}.{name}: one sentence"
