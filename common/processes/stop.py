"""How a process ends when somebody tells it to: SIGINT, SIGTERM and a closed terminal's SIGHUP stop cleanly, a stuck
process ends all the same.

Finished requests are already in the output file, so stopping means leaving the decode loop and closing files. A rank
that waits inside a collective for a peer that has already gone never gets back to Python to do that; a watching thread
ends it after a grace period, without which torchrun would wait half a minute for every such rank.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

GRACE_S = 5.0
_AGAIN_S = 0.01
_ECHO_S = 1.0  # in which a launcher passes a signal on
_PR_SET_PDEATHSIG = 1
_ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_kept: list[object] = []


class Stopped(BaseException):
    """The process was asked to stop. Not an Exception, so that no `except Exception` on the way keeps it running."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number
        self.is_reported = False  # whether the user has read of it


def stop_on_signals(grace_s: float = GRACE_S) -> None:
    """Make signals that end a process raise Stopped in the main thread, and end the process `grace_s` later.

    Python ignores what is raised in a finalizer or a callback of a weak reference, which imports have: there Stopped is
    raised once more, a moment later.
    """
    sys.unraisablehook = _raise_again
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end_after_grace, args=(reader, grace_s), daemon=True).start()
    for signal_number in _ending():
        signal.signal(signal_number, _raise_stopped)


@contextlib.contextmanager
def restored_signals() -> Iterator[tuple[signal.Signals, ...]]:
    """Yield SIGINT and SIGTERM, whose handlers are in the end what they were."""
    numbers = signal.SIGINT, signal.SIGTERM
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        yield numbers
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def drain_on_signals(drain: Callable[[], None]) -> None:
    """Make the first signal that ends a process call `drain`, in a thread, and a later one end the process at
    once.

    What a launcher passes on of a signal that this process has got itself is not a later one.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    end_undisturbed()
    threading.Thread(target=_drain_then_end, args=(reader, drain), daemon=True).start()


def end_undisturbed() -> None:
    """Call after `stop_on_signals`: the work is over and a signal no longer raises, so that the last words and the exit
    code are those of the work.

    The handler does nothing, where SIG_IGN would keep signals from the watching thread, which ends a process that hangs
    on its way out.
    """
    for signal_number in (*_ending(), signal.SIGALRM):
        signal.signal(signal_number, lambda *_: None)


def keep_until_end(holder: object) -> None:
    """Keep what holds memory of a device that may never be done with it, as it waits for a peer: freeing it would wait
    for the device. From now on the process ends without freeing anything."""
    _kept.append(holder)


def end(exit_code: int) -> NoReturn:
    """End the process, at once where something is kept until then."""
    if _kept:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


@atexit.register  # what is registered later runs before it
def _end_what_is_stuck() -> None:
    """End a process at once that did not end by `end`, such as a user's own program."""
    if _kept:
        end(1)


def _ending() -> list[signal.Signals]:
    """Return the signals that end this process; `nohup` has SIGHUP ignored."""
    return [number for number in _ENDING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def _raise_stopped(signal_number: int, frame: FrameType | None) -> NoReturn:
    # A second signal while the first is being served must not cut the clean-up short. With SIG_IGN as the handler,
    # Python would print that one which came with the first is ignored "due to race condition".
    end_undisturbed()
    raise Stopped(signal_number)


def _raise_again(ignored: sys.UnraisableHookArgs) -> None:
    stopped = ignored.exc_value
    if not isinstance(stopped, Stopped):
        sys.__unraisablehook__(ignored)
        return
    number = stopped.signal_number
    signal.signal(signal.SIGALRM, lambda *_: _raise_stopped(number, None))
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)


def _end_after_grace(reader: int, grace_s: float) -> None:
    """End the process some time after a signal. Python writes its number into the pipe at once, even while the main
    thread is inside a collective."""
    while True:
        signal_number = os.read(reader, 1)[0]
        if signal_number in _ENDING:
            threading.Event().wait(grace_s)
            os._exit(128 + signal_number)


def _drain_then_end(reader: int, drain: Callable[[], None]) -> None:
    drained_at: float | None = None
    while True:
        signal_number = os.read(reader, 1)[0]
        if signal_number not in _ENDING:
            continue
        if drained_at is None:
            drained_at = time.monotonic()
            drain()
        elif time.monotonic() - drained_at > _ECHO_S:
            os._exit(128 + signal_number)


def die_with_launcher() -> None:
    """End this worker when torchrun is killed with -9: orphans would go on writing to the output of the next start."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    die_with_parent()
    if os.getppid() == 1:
        raise SystemExit("lopa: the launcher ended before its worker had started")


def die_with_parent() -> None:
    """Let the parent's end, kill -9 too, kill this process and the program that it becomes from now on.

    Look afterwards whether it had ended before. Linux only; elsewhere the output's lock is what protects it.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
