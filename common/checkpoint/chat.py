"""Conversations to text by a checkpoint's chat template, in a process of its own.

A template is a program. One that never ends, or takes all memory, is an error of the request that called it and not the
end of the run: the process has limits (`chat_worker`), and after it was killed the next request gets another.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.checkpoint.chat_worker import CPU_SECONDS
from common.errors import ConfigError, EngineError, first_line
from common.text import conversation

_WORKER = Path(__file__).with_name("chat_worker.py")
# `python FILE` would look for imports in the file's folder first, `python -c` in the current one.
_BOOT = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; "
    "import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
)
_START_SECONDS = 300.0  # of a cold file system
_WALL_SECONDS = 20.0  # of a process that is stopped, or has no processor; its own limit counts processor time


class ChatRenderer:
    """Renders by transformers' own function. Its process is started at the first conversation and ends with this one.

    folder: of the checkpoint, for messages. special_tokens: role -> text, which templates may name.
    """

    def __init__(self, folder: Path, special_tokens: Mapping[str, str]) -> None:
        self._folder = folder
        self._special_tokens = dict(special_tokens)
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def render(
        self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> str:
        """variables: what else the template may read. Raises ConfigError where the messages are none or the template
        fails on them, EngineError where none can be rendered."""
        request = {"template": template, "special_tokens": self._special_tokens, "variables": dict(variables or {})}
        try:
            line = json.dumps({**request, "messages": conversation(messages)})
        except RecursionError:
            raise ConfigError("messages nested too deeply for a chat template: flatten them") from None
        except (TypeError, ValueError) as error:
            raise self._rejected(first_line(error)) from None
        with self._lock:
            answer = self._answer(line)
        if "text" in answer:
            text: str = answer["text"]
            return text
        if answer["is_rejection"]:
            raise self._rejected(answer["error"])
        raise ConfigError(
            f"{self._folder}: the chat template fails ({answer['error']}): correct it, or send `prompt` instead of "
            "`messages`"
        )

    def _rejected(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self._folder}: the chat template rejects the messages ({reason}); "
            "send a list of {role, content} that begins with the system or user"
        )

    def _answer(self, line: str) -> dict[str, Any]:
        """Ask the process, and a second one where the first was ended by something else than its limits."""
        for _ in range(2):
            process = self._process = self._started()
            start = time.monotonic()
            answer = _ask(process, line, _WALL_SECONDS)
            if answer is not None:
                return answer
            self._process = None
            _kill(process)
            if process.returncode == -signal.SIGXCPU:
                return {"error": f"it takes more than {CPU_SECONDS} s", "is_rejection": False}
            if time.monotonic() - start >= _WALL_SECONDS:
                return {"error": f"it takes more than {_WALL_SECONDS:g} s", "is_rejection": False}
        return {"error": f"its process ended with exit code {process.returncode}, twice", "is_rejection": False}

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(_WORKER), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",
                start_new_session=True,  # Ctrl-C is the run's, which may render on until it has ended
            )
        except OSError as error:
            raise EngineError(f"chat templates cannot be rendered ({first_line(error)}): end other processes") from None
        weakref.finalize(self, _kill, process)
        ready = _ask(process, None, _START_SECONDS)
        if ready is None or "error" in ready:
            _kill(process)
            reason = f"exit code {process.returncode}" if ready is None else ready["error"]
            raise EngineError(f"chat templates cannot be rendered ({reason}): install transformers and jinja2 anew")
        return process


def _ask(process: subprocess.Popen[str], line: str | None, seconds: float) -> dict[str, Any] | None:
    """Return the answer; None if the process ended, or was killed after `seconds`."""
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    watch = threading.Timer(seconds, process.kill)
    watch.daemon = True
    watch.start()
    try:
        if line is not None:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline() or "null")
        return answer
    except (BrokenPipeError, ValueError):  # of a process that ended in the middle of its answer
        return None
    finally:
        watch.cancel()


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # of what was written and never read
                pipe.close()
