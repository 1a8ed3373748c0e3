"""Where a command's result goes is looked at before minutes are spent on it, and nothing else is replaced by it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.batch import result_file
from common.commands.bench.steps import make_folder
from common.commands.main import app
from common.errors import ConfigError

check = partial(result_file, "--output")
BENCH = ("conditions", "shapes")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (".", "is a folder: name a file in it"),
        ("x.md", r"\.md is for the tables that go beside it: choose another name"),
        ("file/x.json", "cannot be written"),
        ("taken.json", r"taken\.md is a folder"),
    ],
)
def test_a_place_that_cannot_hold_them_is_refused(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken.md").mkdir()
    with pytest.raises(ConfigError, match=sentence):
        check(tmp_path / name, *BENCH, beside=".md")


def test_a_folder_that_is_not_there_yet_is_made_later(tmp_path: Path) -> None:
    check(tmp_path / "new" / "x.json", *BENCH, beside=".md")
    check(tmp_path / "x", *BENCH, beside=".md")
    assert not list(tmp_path.iterdir())


OTHERS = ["text", '{"id": 1}\n{"id": 2}\n', "[]", "5", '{"conditions": {}}', "[" * 100_000, "\udcff", " <!doctype"]


@pytest.mark.parametrize("content", OTHERS)
@pytest.mark.parametrize("keys", [BENCH, ()])
def test_a_file_that_the_command_has_not_written_is_refused(tmp_path: Path, keys: list[str], content: str) -> None:
    (tmp_path / "a").write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"a: the file is there, and no earlier result of this command: name another"):
        check(tmp_path / "a", *keys)


def test_an_earlier_result_of_the_command_and_an_empty_file_are_replaced(tmp_path: Path) -> None:
    file, link = tmp_path / "a", tmp_path / "link"
    link.symlink_to(file)
    for content, keys in ((json.dumps({"shapes": [], "conditions": {}}), BENCH), ("<!DOCTYPE html>", ()), ("", ())):
        file.write_text(content)
        assert check(link, *keys) == file


@pytest.mark.parametrize("content", [None, ""])
def test_tables_replace_those_of_an_earlier_result_only(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "a.md").write_text("notes")
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError, match=r"a\.json: its tables would replace .*a\.md, which is there"):
        check(tmp_path / "a.json", *BENCH, beside=".md")
    (tmp_path / "a.json").write_text(json.dumps(dict.fromkeys(BENCH)))
    check(tmp_path / "a.json", *BENCH, beside=".md")


def test_a_trace_needs_a_folder(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "a/trace.json").write_text('{"traceEvents": []}')
    make_folder(tmp_path / "a")
    (tmp_path / "a/trace.json").write_text('{"events": []}')
    with pytest.raises(ConfigError, match=r"--profile-trace .*a/trace\.json: the file is there, and no earlier result"):
        make_folder(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--profile-trace .*file: no folder can be made there \(File exists\)"):
        make_folder(tmp_path / "file")


@pytest.mark.parametrize(
    "command",
    [
        ["trace", "a question", "--json"],
        ["trace", "a question", "--html"],
        ["bench", "demo", "--profile", "cpu", "--output"],
        ["bench", "load", "demo", "--output"],
        ["report", ".", "--output"],
    ],
)
def test_commands_replace_no_file_that_they_have_not_written(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the profile sets it
    Path("mine.json").write_text('{"prompt": "x"}')
    error = CliRunner().invoke(app, [*command, "mine.json"]).exception
    assert isinstance(error, ConfigError) and "mine.json: the file is there, and no earlier result" in str(error)
    assert Path("mine.json").read_text() == '{"prompt": "x"}'
