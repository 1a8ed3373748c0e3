"""Compiling in a process of its own: a short expression may come to an automaton of any size, and the library that
makes it cannot be stopped."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path

from common.constraints.automaton import Automaton
from common.constraints.formats import Format
from common.constraints.lift import SIMPLER, Trie
from common.constraints.making import made
from common.errors import ConfigError, first_line

CPU_SECONDS = 8
MEMORY_BYTES = 2 * 2**30
_WALL_SECONDS = 40.0  # of a machine that has no processor for it; its own limit counts processor time
_BOOT = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from common.constraints.apart import main; main()"
)
_LATER = "send it again once the machine is less busy"


class PassingError(ConfigError):
    """A failure that says more of the machine at that moment than of the format."""


def made_apart(format: Format, trie: Trie, cpu_seconds: int = CPU_SECONDS) -> Automaton:
    """Return what `made` does. Raises ConfigError, for what takes more time or memory than there is for one, too."""
    given = pickle.dumps([str(Path(path).absolute()) for path in sys.path]) + pickle.dumps((format, trie, cpu_seconds))
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _BOOT], input=given, capture_output=True, timeout=_WALL_SECONDS, check=False,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise PassingError(f"it takes more than {_WALL_SECONDS:g} s to compile: {SIMPLER}, or {_LATER}") from None
    except OSError as error:
        raise PassingError(
            f"no process to compile it in can be started ({first_line(error)}): end other processes"
        ) from None
    if done.returncode == -signal.SIGXCPU:
        raise ConfigError(f"it takes more than {cpu_seconds} s to compile: {SIMPLER}")
    if done.returncode == -signal.SIGKILL:
        raise PassingError(f"the system ended its compilation: {SIMPLER}, or {_LATER}")
    if done.returncode == -signal.SIGABRT:  # of the library without memory
        raise ConfigError(_out_of_memory())
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
        raise ConfigError(f"compiling it ended with exit code {done.returncode} ({last:.200}): {SIMPLER}")
    found: Automaton | ConfigError = pickle.loads(done.stdout)
    if isinstance(found, ConfigError):
        raise found
    return found


def main() -> None:
    """Read a format, a trie and a limit, write the automaton or a ConfigError."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    found: Automaton | ConfigError
    try:
        format, trie, cpu_seconds = pickle.load(sys.stdin.buffer)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
        found = made(format, trie)
    except ConfigError as error:
        found = error
    except MemoryError:
        found = ConfigError(_out_of_memory())
    except RecursionError:
        found = ConfigError("it is nested too deeply: write it flatter")
    with answers:
        pickle.dump(found, answers)


def _out_of_memory() -> str:
    return f"it takes more than {MEMORY_BYTES >> 30} GiB to compile: {SIMPLER}"
