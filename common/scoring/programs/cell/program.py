"""The guard, which waits for the program, and the program, which gives up what it has and runs what was generated."""

# pathlib takes longer to load than everything else here.
# ruff: noqa: PTH120, PTH123

from __future__ import annotations

import json
import os
import resource
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Job = dict[str, Any]


def guard(job: Job, keeper: int, tell: int) -> NoReturn:
    """Start the program in the keeper's child, outlive it, and leave with 0 if it left with 0."""
    status = 1
    try:
        status = _guard(job, keeper, tell)
    except Exception as error:
        os.write(1, str(error).encode())
    finally:
        os._exit(status)


def _guard(job: Job, keeper: int, tell: int) -> int:
    os.setsid()
    if job["level"] == "namespaces":
        from . import kernel, root, system_calls  # noqa: F401  what the program needs is loaded before its root changes

        kernel.hide_memory()
        kernel.die_with_parent(keeper)
        shared_libraries = os.path.dirname(os.path.dirname(os.__file__))
        root.enter(job["user"], [shared_libraries, *sys.path, *job["libraries"]])
    # Against a keeper that was killed before it could be told of; a handler, since the first process of a pid
    # namespace is deaf to signals without one.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.setitimer(signal.ITIMER_REAL, job["start_limit_s"] + job["time_limit_s"])
    this, program = os.getpid(), os.fork()
    if not program:
        run(job, this, tell)
    while True:
        ended, status = os.wait()
        if ended == program:
            return int(status != 0)


def run(job: Job, guard: int, tell: int) -> NoReturn:
    """Run the program in the guard's child; `tell` gets the process id once only the generated code can fail."""
    try:
        results = _give_up(job, guard, tell)
        os.write(tell, b"%d" % os.getpid())
        os.close(tell)
    except Exception as error:
        os.write(1, str(error).encode())
        os._exit(1)
    try:
        names: dict[str, Any] = {"__name__": "answer"}
        exec(compile(job["source"], "answer", "exec"), names)
        values = [names[job["entry_point"]](*arguments) for arguments in job["inputs"]]
        with open(results, "wb") as stream:
            stream.write(json.dumps(values).encode()[: job["result_limit"]])
        os._exit(0)
    finally:
        os._exit(1)


def _give_up(job: Job, guard: int, tell: int) -> int:
    """Give up everything but a descriptor for the results, which is returned, and a little time and memory."""
    if job["level"] != "namespaces":
        os.chdir(job["folder"])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.path += job["libraries"]
    for name, limit in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    if job["level"] == "namespaces":
        _give_up_rights(job, guard)
    results = os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silence, descriptor)
    first, second = sorted((results, tell))
    for start, end in ((3, first), (first + 1, second), (second + 1, 256)):
        os.closerange(start, end)
    return results


def _give_up_rights(job: Job, guard: int) -> None:
    from . import kernel, system_calls

    if os.geteuid() != job["user"]:
        os.setgroups([])
        os.setresgid(*[job["user"]] * 3)
        os.setresuid(*[job["user"]] * 3)
    kernel.give_up_privileges()
    kernel.hide_memory()
    kernel.die_with_parent(guard)
    if system_calls.is_known():
        system_calls.install()
