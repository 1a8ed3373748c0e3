"""A model hub on loopback that speaks as much of Hugging Face's and ModelScope's protocols as a download takes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tests.loopback import answering

COMMIT = "c0ffee" + "0" * 34
OTHER_COMMIT = "decade" + "0" * 34
_HF_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
_HF_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_MS = re.compile(r"/api/v1/models/([^/]+/[^/]+)/(repo/files|repo)")


@dataclass
class Hub:
    """repositories: name -> folder. cut: file -> bytes after which its first download breaks off. held: files whose
    download waits until `release` is set."""

    repositories: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    release: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)
    commit: str = COMMIT
    url: str = ""

    def downloads(self, file: str) -> list[str]:
        """The GETs of a file, each with the range that it asked for."""
        return [line for line in self.requests if line.startswith("GET") and f"/{file} " in line]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    with answering(type("Handler", (_Handler,), {"hub": hub})) as hub.url:
        try:
            yield hub
        finally:
            hub.release.set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        self.hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}")
        if match := _HF_INFO.fullmatch(path):
            self._tell(match[1], match[2], match[3] or "main")
        elif match := _HF_FILE.fullmatch(path):
            if match[1] in self.hub.gated:
                self._refuse(403, "GatedRepo")
            else:
                self._send(self.hub.repositories[match[1]] / match[3])
        elif match := _MS.fullmatch(path):
            self._tell_modelscope(match[1], match[2], query)
        else:
            self._refuse(404, "EntryNotFound")

    do_HEAD = do_GET

    def _tell(self, name: str, what: str, revision: str) -> None:
        folder = self.hub.repositories.get(name)
        if folder is None:
            return self._refuse(401, "RepoNotFound")
        if revision not in ("main", "v1", self.hub.commit):
            return self._refuse(404, "RevisionNotFound")
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in _files(folder)}
        if what == "tree":
            tree = [
                {"type": "file", "path": path, "size": len(data), "oid": _digest(data)} for path, data in files.items()
            ]
            return self._answer(200, json.dumps(tree).encode())
        siblings = [{"rfilename": path, "size": len(data), "blobId": _digest(data)} for path, data in files.items()]
        info = {"id": name, "modelId": name, "sha": self.hub.commit, "private": False, "tags": [], "siblings": siblings}
        return self._answer(200, json.dumps(info).encode())

    def _tell_modelscope(self, name: str, what: str, query: dict[str, list[str]]) -> None:
        folder = self.hub.repositories.get(name)
        if folder is None:
            return self._answer(404, json.dumps({"Code": 10010205001, "Success": False, "Message": "absent"}).encode())
        if what == "repo":
            return self._send(folder / query["FilePath"][0])
        files = [
            {
                "Path": path.relative_to(folder).as_posix(), "Name": path.name, "Type": "blob",
                "Size": path.stat().st_size, "Sha256": _digest(path.read_bytes()),
            }
            for path in _files(folder)
        ]  # fmt: skip
        return self._answer(200, json.dumps({"Code": 200, "Success": True, "Data": {"Files": files}}).encode())

    def _send(self, path: Path) -> None:
        data = path.read_bytes()
        headers = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": self.hub.commit, "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            return self._answer(200, data, headers)
        begin = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or ["", "0"])[1])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        most = self.hub.cut.pop(path.name, None)
        if path.name in self.hub.held:
            self.hub.release.wait()
        self._answer(206 if begin else 200, data[begin:], headers, most)
        if most is not None:
            self.close_connection = True
        return None

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, most: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:most])

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
