"""docs/settings.md says what the models check, all of it."""

from __future__ import annotations

import re

import pytest
from write_settings import PAGE, SECTIONS, page

from common.config import DecodeConfig, Frozen
from common.config.frozen import Settings
from common.config.strategies import Strategy
from common.policies import shipped


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
