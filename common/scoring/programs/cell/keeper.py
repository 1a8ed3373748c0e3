"""The keeper: from a job on its standard input to an exit status, with nothing of the program left behind.

Standard input is the life line too: when it ends, the run has what it wants or is gone. Standard output is where the
program's results go; since the keeper holds it open, its end says that everything has been cleared away.
"""

# pathlib takes longer to load than everything else here.
# ruff: noqa: PTH102

from __future__ import annotations

import json
import os
import select
import signal
import time

from . import folder, program

TYPE_CHECKING = False  # as typing's, which takes as long to import as all of this
if TYPE_CHECKING:
    from typing import NoReturn

RAN, FAILED, NOT_STARTED = 0, 1, 3
_LIFE_LINE = 0


def main() -> NoReturn:
    """Run in a fresh interpreter. What keeps it from starting the program is written where the results would go."""
    status = NOT_STARTED
    try:
        status = _keep(json.loads(_read_all(_LIFE_LINE)))
    except Exception as error:
        os.write(1, str(error).encode())
    finally:
        os._exit(status)


def _read_all(descriptor: int) -> bytes:
    """Return as many bytes as the first eight say."""
    size, received = 8, b""
    while len(received) < size:
        part = os.read(descriptor, 2**20)
        if not part:
            raise OSError("the run ended before the job was sent")
        received += part
        if len(received) >= 8:
            size = 8 + int.from_bytes(received[:8], "little")
    return received[8:]


def _keep(job: program.Job) -> int:
    if job["level"] == "namespaces":
        from . import root

        job["user"] = root.leave()
        return _run_guarded(job)
    os.mkdir(job["folder"], 0o700)
    try:
        return _run_guarded(job)
    finally:
        folder.remove(job["folder"])


def _run_guarded(job: program.Job) -> int:
    news, tell = os.pipe()
    keeper = os.getpid()
    guard = os.fork()
    if not guard:
        os.close(news)
        program.guard(job, keeper, tell)
    os.close(tell)
    started, has_ended = _watch(news, job["start_limit_s"], job["time_limit_s"])
    ran = _end(job["level"], guard, started, has_ended)
    if started is None:
        return NOT_STARTED
    return RAN if ran else FAILED


def _watch(news: int, start_limit_s: float, time_limit_s: float) -> tuple[int | None, bool]:
    """Return the program's process id once it has started, and whether guard and program have ended by themselves."""
    started: int | None = None
    ends_at = time.monotonic() + start_limit_s
    poll = select.poll()
    for descriptor in (_LIFE_LINE, news):
        poll.register(descriptor, select.POLLIN)
    while (left_s := ends_at - time.monotonic()) > 0:
        ready = [descriptor for descriptor, _ in poll.poll(1000 * left_s)]
        if news in ready:
            told = os.read(news, 32)
            if not told:
                return started, True
            started, ends_at = int(told), time.monotonic() + time_limit_s
        elif _LIFE_LINE in ready:
            break
    return started, False


def _end(level: str, guard: int, started: int | None, has_ended: bool) -> bool:
    """End everything that lives, a pid namespace with its first process; return whether the program had ended well by
    itself before."""
    if not has_ended:
        os.kill(guard, signal.SIGKILL)
    if level == "limits":
        _kill(-guard)
    _, status = os.waitpid(guard, 0)
    if level == "limits" and started is not None and not os.WIFEXITED(status):
        _kill(started)
    return status == 0


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return
