"""What a process tells its terminal, or the file in its place; where a disk is full, none ends otherwise for it."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import TextIO

from common.errors import harmless


def say(sentence: str) -> None:
    """Write one line to standard error, where that can be written."""
    with suppress(OSError):
        print(f"lopa: {sentence}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Write an answer to standard output: as it is to a file or a pipe, without what would steer a terminal to one."""
    print(harmless(text, "\n\t") if sys.stdout.isatty() else text, flush=True)


def inform(text: str, *, err: bool = False) -> None:
    """Write lines that may hold names of files, rows and models, which say nothing to a terminal."""
    print(harmless(text, "\n\t"), file=sys.stderr if err else sys.stdout, flush=True)


def drop_unwritten() -> None:
    """Let go of what the standard streams could not write: Python tries once more when it ends, and would put its own
    exit code in place of the process's."""
    _flush_or_drop(sys.stdout)
    _flush_or_drop(sys.stderr)


def _flush_or_drop(stream: TextIO) -> None:
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def log_to_stderr(time: bool = False, level: int = logging.WARNING) -> None:
    """Log to standard error. A line that cannot be written is lost, without the traceback that Python writes then.

    time: whether lines begin with it.
    """
    logging.raiseExceptions = False
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable(f"{'%(asctime)s ' if time else ''}lopa: %(message)s"))
    logging.basicConfig(handlers=[handler], level=level)


class _Printable(logging.Formatter):
    """Lines whose names, of files and rows, say nothing to the terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return harmless(super().formatMessage(record), "\n\t")
