"""Run one program that nobody has read, in a cell of its own, and get back what it yields.

The package `cell` is the other end: a fresh interpreter that keeps the program and clears up after it. This side waits
for a bounded time, reads a bounded number of bytes and believes nothing of what it reads.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from common.scoring.programs.cell.folder import remove
from common.scoring.programs.cell.keeper import NOT_STARTED, RAN

Level = Literal["namespaces", "limits"]

TIME_LIMIT_S = 2.0
MEMORY_LIMIT_BYTES = 512 * 2**20
FILE_LIMIT_BYTES = 64 * 2**10
RESULT_LIMIT_BYTES = 64 * 2**10
# For a busy machine. Only a keeper that was tampered with needs longer.
START_LIMIT_S = 4.0
END_LIMIT_S = 6.0
_LOOK_EVERY_S = 0.25
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # numpy's; a program may start none

_CELL = Path(__file__).parent
_START = "import sys; sys.path.insert(0, sys.argv[1]); from cell.keeper import main; sys.path.pop(0); main()"


class NotStarted(OSError):
    """The cell could not be made, so that nothing is known of the program."""


def run_program(
    source: str, entry_point: str, inputs: Sequence[object], level: Level, time_limit_s: float | None = None
) -> list[object] | None:
    """Return what `entry_point` yields for each of `inputs` (lists of positional arguments), as JSON holds it.

    time_limit_s: wall and processor time, TIME_LIMIT_S unless given.
    None where the program fails, exceeds a limit, yields what JSON cannot hold or tampers with its keeper.
    Raises NotStarted where this machine cannot make a cell of this level.
    """
    name = f"lopa-answer-{os.getpid()}-{secrets.token_hex(4)}"
    folder = str(Path(tempfile.gettempdir()) / name)
    time_limit_s = TIME_LIMIT_S if time_limit_s is None else time_limit_s
    job = _job(source, entry_point, inputs, level, folder, time_limit_s)
    # Without `site` the interpreter starts in half the time; its packages are added by the cell.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _START, str(_CELL), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd="/",
        env={"LOPA_ANSWER": name} | dict.fromkeys(_THREADS, "1"),
        start_new_session=True,
    )
    try:
        output = _exchange(process, job, time.monotonic() + START_LIMIT_S + time_limit_s + END_LIMIT_S)
    finally:
        _end(process)
        remove(folder)
    if process.returncode == NOT_STARTED:
        raise NotStarted(f"no cell by {level}: {output.decode(errors='replace') or 'not ready in time'}")
    return _values(output) if process.returncode == RAN else None


def library_folders() -> list[str]:
    """Return where a program finds libraries beside the standard one."""
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def _job(
    source: str, entry_point: str, inputs: Sequence[object], level: Level, folder: str, time_limit_s: float
) -> bytes:
    """Return the job as eight bytes of length, then JSON."""
    job = {
        "level": level,
        "folder": folder,
        "source": source,
        "entry_point": entry_point,
        "inputs": inputs,
        "libraries": library_folders(),
        "limits": _limits(time_limit_s),
        "start_limit_s": START_LIMIT_S,
        "time_limit_s": time_limit_s,
        "result_limit": RESULT_LIMIT_BYTES,
    }
    body = json.dumps(job).encode()
    return len(body).to_bytes(8, "little") + body


def _limits(time_limit_s: float) -> dict[str, int]:
    limits = {
        "RLIMIT_AS": MEMORY_LIMIT_BYTES,
        "RLIMIT_CPU": math.ceil(time_limit_s),
        "RLIMIT_FSIZE": FILE_LIMIT_BYTES,
        "RLIMIT_NOFILE": 32,
        "RLIMIT_NPROC": 0,
        "RLIMIT_CORE": 0,
    }
    return limits | ({"RLIMIT_MSGQUEUE": 0, "RLIMIT_MEMLOCK": 0} if sys.platform == "linux" else {})


def _exchange(process: subprocess.Popen[bytes], job: bytes, ends_at: float) -> bytes:
    """Send the job; receive until the cell has gone, it has said too much or the time is up."""
    assert process.stdin is not None and process.stdout is not None
    sending, receiving = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(sending, False)
    poll = select.poll()
    poll.register(sending, select.POLLOUT)
    poll.register(receiving, select.POLLIN)
    received, left = bytearray(), memoryview(job)
    while (left_s := ends_at - time.monotonic()) > 0 and len(received) <= RESULT_LIMIT_BYTES:
        ready = [descriptor for descriptor, _ in poll.poll(1000 * min(left_s, _LOOK_EVERY_S))]
        if not ready and process.poll() is not None:
            break  # something that it could not end holds the pipe open
        if sending in ready:
            left = _send_some(sending, left)
            if not left:
                poll.unregister(sending)
        if receiving in ready:
            part = os.read(receiving, RESULT_LIMIT_BYTES + 1 - len(received))
            if not part:
                break
            received += part
    return bytes(received)


def _send_some(descriptor: int, left: memoryview) -> memoryview:
    """Send some; return what is left, nothing if nobody listens any more."""
    try:
        return left[os.write(descriptor, left) :]
    except BrokenPipeError:
        return left[:0]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Cut the life line, which ends the cell; by force if that takes too long."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    try:
        process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_LIMIT_S)


def _values(output: bytes) -> list[object] | None:
    try:
        values: Any = json.loads(output.decode())
    except (ValueError, RecursionError):  # no JSON, or nested deeper than the parser goes
        return None
    return values if isinstance(values, list) else None
