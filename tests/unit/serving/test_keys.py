"""Tests of who may come in."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.serving.keys import KEYS_VARIABLE, is_known, read_keys


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "one, two")
    file = tmp_path / "keys"
    file.write_text("three\n\n # nine\n four \n")
    keys = read_keys(str(file))
    names = ("one", "two", "three", "four", "five", "# nine", "")
    assert [name for name in names if is_known(f"Bearer {name}", keys)] == ["one", "two", "three", "four"]
    assert is_known("bearer one", keys) and not is_known("Basic one", keys) and not is_known(None, keys)


def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_its_first_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n", encoding="utf-8-sig")
    assert is_known("Bearer one", read_keys(str(tmp_path / "keys")))


def test_a_key_that_some_clients_send_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("one\nschl\u00fcssel\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"keys or {KEYS_VARIABLE} is not plain ASCII"):
        read_keys(str(tmp_path / "keys"))
    monkeypatch.setenv(KEYS_VARIABLE, "schl\u00fcssel")
    with pytest.raises(ConfigError, match=f"{KEYS_VARIABLE} is not plain ASCII"):
        read_keys(None)


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"# one\n", b"\xff\xfe"])
def test_a_file_without_keys_is_refused_in_a_sentence(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="keys"):
        read_keys(str(file))


@pytest.mark.parametrize("given", ["", " ", ",", " , ,"])
def test_a_variable_without_keys_does_not_open_the_server(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("one\n")
    monkeypatch.setenv(KEYS_VARIABLE, given)
    for file in (None, str(tmp_path / "keys")):
        with pytest.raises(ConfigError, match=f"{KEYS_VARIABLE} is set and holds no key"):
            read_keys(file)


def test_without_keys_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    assert read_keys(None) == ()


def test_a_file_without_an_end_is_no_file_of_keys() -> None:
    with pytest.raises(ConfigError, match=r"/dev/zero: the API keys cannot be read .it is longer than a MiB"):
        read_keys("/dev/zero")
