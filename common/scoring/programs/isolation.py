"""Whether programs that nobody has read can be run on this machine without harm to it.

They are run in namespaces of their own, or not at all: without namespaces a program of the user's can write what the
user can. Whoever accepts that says so with LOPA_UNCONFINED_PROGRAMS=1.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import threading

from common.errors import ConfigError
from common.scoring.programs.run import Level, NotStarted, run_program

logger = logging.getLogger(__name__)

SWITCH = "LOPA_UNCONFINED_PROGRAMS"
MEANINGS: dict[Level, str] = {
    "namespaces": "a program sees no process, network or file but its own, and can write nothing that stays",
    "limits": "a program has limits of time and memory, may write what the user can and may leave processes behind",
}
_one_at_a_time = threading.Lock()
_PROBE_LIMIT_S = 30.0  # a busy machine must not pass for one that can do less
_PROBE = "import decimal, random, re\ndef probe(number):\n    return [number, len(re.sub('x', '', 'xy'))]"


def isolation() -> Level:
    """Return the level for every program of this process; the first time it is tried out with a harmless one and
    logged.

    Raises ConfigError on a machine without namespaces where nobody has allowed to do without them.
    """
    with _one_at_a_time:
        return _chosen()


@functools.cache
def _chosen() -> Level:
    reason = why_not("namespaces")
    if reason is None:
        logger.info("scoring programs by namespaces: %s", MEANINGS["namespaces"])
        return "namespaces"
    if os.environ.get(SWITCH) != "1":
        raise ConfigError(
            f"generated programs cannot be confined here ({reason}): run where the user may make namespaces, or set "
            f"{SWITCH}=1 to run them with limits of time and memory only"
        )
    logger.warning("scoring programs by limits (%s): %s", reason, MEANINGS["limits"])
    return "limits"


@functools.cache
def strongest() -> Level:
    """Return the level for programs of this package's own, which take what a model has written as data."""
    return "limits" if why_not("namespaces") else "namespaces"


def why_not(level: Level) -> str | None:
    """Return why no program runs at this level here; None if one does."""
    try:
        values = run_program(_PROBE, "probe", [[7]], level, _PROBE_LIMIT_S)
    except NotStarted as reason:
        return str(reason)
    return None if values == [[7, 1]] else f"a harmless program fails by {level}"


def program_scorer() -> str:
    """Return what the mark of a program depends on beside the program: the interpreter, and what it may do in its
    cell."""
    return f"Python {platform.python_version()}, {isolation()}"
