"""Who may come in."""

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


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe"])
def test_a_file_without_keys_is_refused_in_a_sentence(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="keys"):
        read_keys(str(file))


def test_without_keys_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    assert read_keys(None) == ()
