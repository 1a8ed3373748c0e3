"""torchrun with an ending that a user can read, on one node or several.

The agent of torchrun ends its workers when one of them fails, but ends itself with a stack trace and a table, and
agents on other nodes do not hear of it. Here its failure becomes one sentence, that of the rank that failed first; the
nodes watch each other through the rendezvous store, so that a dead worker or a dead node ends all within seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import LOST_PEER, first_line
from common.processes.nodes import Nodes
from common.processes.saying import say
from common.processes.watch import NodeWatch
from common.user_files import write_whole

_KILLED_HEAD_START_S = 15.0  # between a poll of the agent's and its patience with a rank that it ends
_ABORTED_HEAD_START_S = 7.5  # a rank that another's death has aborted is not the cause
_HINTS = {
    "SIGKILL": "; the system does that when memory runs out",
    "SIGABRT": f"; torch does that where a check of its own fails, or {LOST_PEER}",
}


def supervise(arguments: Sequence[str], nodes: Nodes | None = None, num_here: int = 1) -> int:
    """Run torchrun with these arguments in this process; its exit code, after saying what went wrong.

    num_here: ranks on each node.
    """
    torchrun = _quiet_torchrun()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    watch = NodeWatch(nodes, num_here) if nodes is not None and nodes.count > 1 else None
    if watch is not None:
        watch.start()
    try:
        # A folder that torchrun makes itself is left behind.
        with tempfile.TemporaryDirectory(prefix="lopa-launcher-", ignore_cleanup_errors=True) as folder:
            torchrun.main([f"--log-dir={folder}", *arguments])
        if watch is not None:
            watch.tell(None)
            watch.linger()
        return 0
    except ChildFailedError as error:
        sentence, exit_code = root_cause(error.failures)
        if watch is not None:
            watch.tell(sentence)
            sentence = watch.cause(sentence)
            watch.linger()
    except SignalException as stopped:
        if watch is None or watch.reason is None:
            return 128 + int(stopped.sigval)
        sentence, exit_code = watch.reason, 1
    except (RuntimeError, OSError) as error:  # the rendezvous: an address or a port that does not work
        sentence, exit_code = f"the processes could not be started: {first_line(error)}", 1
    finally:
        if watch is not None:
            watch.end()
    write_error_file(sentence)  # for who started this launcher
    say(sentence)
    return exit_code


def _quiet_torchrun() -> Any:
    """torch.distributed.run, whose loggers take their level from LOGLEVEL when they are made."""
    level = os.environ.get("LOGLEVEL")
    os.environ["LOGLEVEL"] = level or "CRITICAL"
    from torch.distributed import run

    if level is None:
        del os.environ["LOGLEVEL"]
        logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    return run


def root_cause(failures: Mapping[int, Any]) -> tuple[str, int]:
    """Return what the user should read, and the exit code: the rank that failed first, not those it took along."""
    rank, failure = min(failures.items(), key=lambda item: _order(item[1]))
    if failure.exitcode < 0:
        name = failure.signal_name()
        return f"rank {rank} (pid {failure.pid}) was killed by {name}{_HINTS.get(name, '')}", 128 - failure.exitcode
    message = failure.error_file_data.get("message", {})
    if isinstance(message, dict) and message.get("message"):
        return f"rank {rank} failed: {message['message']}", failure.exitcode
    return f"rank {rank} failed with exit code {failure.exitcode}; its own output is above", failure.exitcode


def _order(failure: Any) -> tuple[bool, float]:
    """Sort by time, and those last that the agent ended because of the others.

    A rank killed from outside is noticed a moment after its peers have complained; one that the agent had to kill,
    because it had stopped answering, half a minute after.
    """
    message = failure.error_file_data.get("message", {})
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    noticed_at = float(extra.get("time", failure.timestamp))
    was_ended = failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    if failure.exitcode < 0 and not was_ended:
        is_abort = failure.exitcode == -signal.SIGABRT
        noticed_at -= _ABORTED_HEAD_START_S if is_abort else _KILLED_HEAD_START_S
    return was_ended, noticed_at


def write_error_file(sentence: str) -> None:
    """Leave last words where who started this process looks for them, torchrun's agent among them; else nothing.

    A disk that is full has no room for them: there is no file then, since torchrun cannot read half a one.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        now = time.time()
        message = {"message": sentence, "extraInfo": {"timestamp": str(int(now)), "time": now}}
        with contextlib.suppress(OSError):
            write_whole(Path(path), json.dumps({"message": message}).encode())


def read_error_file(path: Path) -> str | None:
    """Return the last words that `write_error_file`, or torchrun, has left there; None: there are none."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
