"""What can go wrong: a setting to correct, hardware that failed, hardware that is not there."""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

_BEGIN, _END = 1000, 500  # characters of a message that names something endless: the fix stands at its end


class ConfigError(ValueError):
    """A setting is wrong; the message names the file, the key and the fix, in one printable line of bounded length
    whatever they are called."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@contextmanager
def placed(where: object) -> Iterator[None]:
    """Name this file, or place in it, in front of what is wrong."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


class EngineError(RuntimeError):
    """The hardware side failed; the message names rank, step and what to do."""


class MissingCapability(EngineError):
    """This machine or build cannot do what the profile asks; the message says what to change."""


_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")  # by name: torch is not loaded for it
_SIGNS_OF_LITTLE_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "Failed to allocate memory",  # CANN's EL0004
    "Insufficient_Device_Memory",  # HCCL's EI0011
    "Storage size calculation overflowed",  # more than an address can name
    "Overflow when unpacking long",
)

_FIXES = {  # of what the system refuses
    errno.ENOENT: "it is not there, or no longer: name another, or put it back",
    errno.ENAMETOOLONG: "choose a shorter one, of at most 255 bytes between two slashes and 4,095 in all",
    errno.ENOSPC: "make room, or write elsewhere",
    errno.EDQUOT: "make room, or write elsewhere",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "end other processes, which hold too many files open",
    errno.ENOMEM: "end other processes, or take a machine of more memory",
    errno.EACCES: "correct its permissions, or name another",
    errno.EPERM: "correct its permissions, or name another",
}
NO_SUCH_FILE = "no such file"
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
LOST_PEER = "a peer is gone or stuck"  # in messages that follow from another process's end


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory, of the host or of a device, could not be had; torch says so in several ways."""
    if any(kind.__name__ in _OUT_OF_MEMORY for kind in type(error).__mro__):
        return True
    return any(sign in str(error) for sign in _SIGNS_OF_LITTLE_MEMORY)


def why_no_file(path: Path) -> str:
    """Return what stands where a file should, as part of a sentence."""
    try:
        return "a folder" if path.is_dir() else "no regular file" if path.exists() else NO_SUCH_FILE
    except (OSError, ValueError):  # a name that no file can have
        return NO_SUCH_FILE


def what_failed(error: BaseException) -> str:
    """An error as one printable line: of what the system refuses the file, the reason and the fix."""
    if not isinstance(error, OSError) or error.strerror is None or error.errno is None:
        return one_line(" ".join(str(error).split()))
    files = [
        os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes, os.PathLike))
    ]
    where = "".join(f"{name}: " for name in [" to ".join(files)] if name)
    fix = _FIXES.get(error.errno, "name another" if where else "")
    return one_line(f"{where}{error.strerror}{fix and '; '}{fix}")


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return a question to put before the list of what is known; "" if nothing is alike."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}? " if close else ""


def first_line(error: BaseException) -> str:
    """Return an error's first line, or its name if it has no text."""
    line = (str(error).strip() or repr(error)).splitlines()[0]
    if isinstance(error, OSError):
        line = line.removeprefix(f"[Errno {error.errno}] ")
    # Python's own advice is for programmers.
    return "a number of more digits than can be read" if "set_int_max_str_digits" in line else line


def harmless(text: str, besides: str = "") -> str:
    """The text without control characters, which steer a terminal: Python's escapes stand in their place, but for those
    of `besides`."""
    return _CONTROLS.sub(lambda found: found[0] if found[0] in besides else repr(found[0])[1:-1], text)


def as_shell(words: Iterable[str]) -> str:
    """The words as one printable line that bash reads as they are."""
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_quoted, word))}'" for word in words)


def _quoted(character: str) -> str:
    if character.isprintable() and character not in "\\'":
        return character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def one_line(message: str) -> str:
    """Return the message as one printable line, without its middle if it is long."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(message.splitlines()))
    return line if len(line) <= _BEGIN + _END else f"{line[:_BEGIN]} ... {line[-_END:]}"
