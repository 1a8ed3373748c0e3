"""What runs before the routes: names and keys, who may come in, and the answer where the server itself failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asgi import asked

from common.errors import ConfigError
from common.serving.http.gate import Gate, hosts_of
from common.serving.keys import KEYS_VARIABLE, is_known, read_keys

LOCAL = hosts_of("127.0.0.1", "my-laptop", ["models.example"], ())


async def _defect(scope: Any, receive: Any, send: Any) -> None:
    raise ZeroDivisionError


async def _fine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def answered(gate: Gate, **headers: str) -> tuple[int, Any]:
    status, body = asked(gate, "GET", "/health", **headers)
    return status, json.loads(body)


def gate_of(app: Any, hosts: frozenset[str] | None) -> Gate:
    return Gate(app, (), hosts, lambda route, status: None)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "my-laptop:80"]
)
def test_local_names_are_answered_to(host: str) -> None:
    gate = gate_of(_fine, LOCAL)
    assert answered(gate, host="models.example")[0] == 200
    assert answered(gate, host=host)[0] == answered(gate, host="localhost", origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "evil.example@localhost", "[", ":", "é",
        "localhost/evil.example", "localhost\\evil.example", "localhost?evil", "localhost#evil", "localhost\tevil",
        "local\thost", "[::1]evil", "[localhost]", "localhost:80:80", "localhost:x", "127.1",
    ],
)  # fmt: skip
def test_other_names_are_refused_where_no_key_is_wanted(host: str) -> None:
    status, body = answered(gate_of(_fine, LOCAL), host=host)
    assert status == 403 and "serve.allowed_hosts" in body["error"]["message"]


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example", "null", "http://localhost.evil.example", "file://", "chrome-extension://a", "localhost",
        "http://evil.example@localhost", "http://localhost/evil.example", "http://localhost\\evil.example",
    ],
)  # fmt: skip
def test_pages_of_others_are_refused(origin: str) -> None:
    status, body = answered(gate_of(_fine, LOCAL), host="localhost", origin=origin)
    assert status == 403 and body["error"]["message"].startswith("Origin ")


def test_names_matter_on_this_machine_and_without_keys_only() -> None:
    assert hosts_of("0.0.0.0", "0.0.0.0", (), ()) is None and hosts_of("127.0.0.1", "localhost", (), [b"key"]) is None
    assert hosts_of("::1", "::1", (), ()) is not None and hosts_of("127.0.0.2", "127.0.0.2", (), ()) is not None
    assert answered(gate_of(_fine, None), host="any.example", origin="https://any.example")[0] == 200


def test_a_defect_is_a_sentence_and_one_traceback(caplog: pytest.LogCaptureFixture) -> None:
    gate = gate_of(_defect, None)
    for _ in range(3):
        status, body = answered(gate)
        assert status == 500 and "its log says how" in body["error"]["message"]
    (record,) = caplog.records
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError


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
