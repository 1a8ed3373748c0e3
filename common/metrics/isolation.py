"""How generated programs are kept from harming a run on this machine: by the strongest level that works when tried.

Each level is the next one and more. `limits`: time, memory, files, descriptors, and what is read of a program.
`subreaper`: what it started is found and ended however it hides, and dies with its keeper. `seccomp`: it can start,
signal and trace nothing in the first place, nor use the network. `namespaces`: it sees nothing else of the machine.
"""

from __future__ import annotations

import functools
import logging
import platform
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.metrics.programs import LEVELS, Level, NotStarted, run_program

logger = logging.getLogger(__name__)

MEANINGS: dict[Level, str] = {
    "namespaces": "a program sees no process, network or file but its own, and can write nothing that stays",
    "seccomp": "a program can start or signal no process and use no network, but can write what the user can",
    "subreaper": "what a program starts is ended with it, but it can signal and write what the user can",
    "limits": "a program has limits of time and memory only, and may leave processes behind if it sets out to",
}
_one_at_a_time = threading.Lock()
_PROBE_LIMIT_S = 30.0  # a busy machine must not pass for one that can do less
_PROBE = "import decimal, random, re\ndef probe(number):\n    return [number, len(re.sub('x', '', 'xy'))]"


@dataclass(frozen=True, slots=True)
class Isolation:
    level: Level

    def __str__(self) -> str:
        return f"{self.level}: {MEANINGS[self.level]}"


def isolation() -> Isolation:
    """The level used for every program of this process; tried out by a harmless one and logged the first time."""
    with _one_at_a_time:
        return _strongest()


@functools.cache
def _strongest() -> Isolation:
    level = next((level for level in LEVELS[:-1] if works(level)), LEVELS[-1])
    chosen = Isolation(level)
    is_weak = level in ("subreaper", "limits")
    logger.log(logging.WARNING if is_weak else logging.INFO, "scoring programs by %s", chosen)
    return chosen


def works(level: Level) -> bool:
    """Whether a program runs at this level here."""
    try:
        return run_program(_PROBE, "probe", [[7]], level, _PROBE_LIMIT_S) == [[7, 1]]
    except NotStarted as reason:
        logger.debug("%s", reason)
        return False


def program_scorer() -> str:
    """What the mark of a program depends on beside the program: the interpreter, and what it may do in its cell."""
    return f"Python {platform.python_version()}, {isolation().level}"


def code_isolation(summary: Mapping[str, Any]) -> str | None:
    """For the metrics of a run: how its programs were kept, None if it scored none."""
    accuracy = summary["accuracy"]
    return str(isolation()) if accuracy is not None and "code" in accuracy["by_kind"] else None
