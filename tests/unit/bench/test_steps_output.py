"""Where a bench's results go is looked at before minutes are spent on measuring them."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.commands.bench.steps import check_output, make_folder
from common.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (".", "is a folder: name a file in it"),
        ("x.md", r"\.md is for the table that is written beside it: name a JSON file"),
        ("file/x.json", "cannot be written"),
        ("taken.json", r"taken\.md is a folder"),
    ],
)
def test_a_place_that_cannot_hold_them_is_refused(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken.md").mkdir()
    with pytest.raises(ConfigError, match=sentence):
        check_output(tmp_path / name)


def test_a_folder_that_is_not_there_yet_is_made_later(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "x.json")
    check_output(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_trace_needs_a_folder(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--profile-trace .*file: no folder can be made there \(File exists\)"):
        make_folder(tmp_path / "file")
