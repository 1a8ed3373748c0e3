"""A front end as seen from the process that starts it: its socket, its start, its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import NamedTuple

from common.config import RunConfig, ServeConfig
from common.errors import ConfigError
from common.serving.keys import read_keys
from common.serving.link import Link, LinkClosed
from common.serving.messages import Begin, Failed
from common.serving.served import model_names

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
NEEDED_BY_TRACES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
LAST_WORDS_S = 5.0


class FrontEnd(NamedTuple):
    process: subprocess.Popen[bytes]
    link: Link

    def drain(self) -> None:
        """Let it finish what it has, and take nothing more."""
        with suppress(OSError):
            self.process.send_signal(signal.SIGTERM)

    def fail(self, sentence: str) -> None:
        """Give its clients the sentence, then let it end."""
        self.link.send_last([Failed(sentence)], LAST_WORDS_S)
        self.wait()

    def why_gone(self) -> str:
        """Return how it has ended, once its end of the link is closed."""
        self.wait()
        code = self.process.wait()
        if code < 0:
            return f"the HTTP front end was killed by {signal.Signals(-code).name}"
        return f"the HTTP front end has ended with exit code {code}; what it had to say is above"

    def wait(self) -> None:
        try:
            self.process.wait(LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


def check_serving(serve: ServeConfig) -> tuple[bytes, ...]:
    """Return the API keys' digests, read once, since a pipe has them once. Raises ConfigError for what can be known to
    fail before anything is started."""
    missing = [name for name in _NEEDED if not is_installed(name)]
    if missing:
        raise ConfigError(f"lopa serve needs {', '.join(missing)}: pip install -e '.[server]'")
    if serve.otlp_traces_endpoint is not None and not all(map(is_installed, NEEDED_BY_TRACES)):
        raise ConfigError(
            "serve.otlp_traces_endpoint needs opentelemetry-sdk and its exporter: pip install -e '.[otel]', or leave "
            "it out"
        )
    return read_keys(serve.api_key_file)


def is_installed(name: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def start_front_end(
    run: RunConfig, keys: tuple[bytes, ...], listening: socket.socket, meeting: socket.socket | None = None,
    num_replicas: int = 1, environment: Mapping[str, str] | None = None,
) -> FrontEnd:  # fmt: skip
    """Start a process that answers. meeting: where replicas come to, which the front end then speaks with instead."""
    own, other = socket.socketpair()
    fds = [one.fileno() for one in (listening, other, meeting) if one is not None]
    process = subprocess.Popen(
        [sys.executable, "-m", "common.serving.http", *map(str, fds)],
        pass_fds=fds,
        env={**os.environ, **(environment or {}), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        start_new_session=True,  # signals of the terminal are this process's, which passes them on
    )
    port = int(listening.getsockname()[1])
    other.close()
    link = Link(own)
    with suppress(LinkClosed):  # noticed once it is needed
        link.send([Begin(run, model_names(run), port, keys, num_replicas)])
    return FrontEnd(process, link)


def listen(serve: ServeConfig) -> socket.socket:
    """Return the socket that clients come to. Raises ConfigError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in serve.host else socket.AF_INET
    try:
        return socket.create_server((serve.host, serve.port), family=family, backlog=2048)
    except (OSError, TypeError, ValueError) as error:  # the latter two: a name that no resolver takes
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise ConfigError(
            f"{serve.host:.200}:{serve.port} cannot be listened on ({reason}): choose another address with --host, or "
            "another port with --port"
        ) from None
