"""Plain loops over arrays, as machine code where numba is installed and as the Python they are elsewhere.

The one module that imports numba. A function marked `compiled` is written in the part of Python that numba takes;
`NUMBA_DISABLE_JIT=1` runs it uncompiled, so that a debugger steps through it. Machine code is kept in the user's cache
folder (`LOPA_LOOPS_FOLDER`, else `lopa/loops`), apart for every state of the sources: numba itself looks at a
function's own file only, not at those it calls. Where that folder cannot be written, every start compiles.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from common.user_files import user_folder

Function = TypeVar("Function", bound=Callable[..., Any])
Records = npt.NDArray[np.void]

logger = logging.getLogger(__name__)

_LEAST_FREE = 300 << 20  # bytes, of which machine code takes two thirds
_SOURCES = ("compiled.py", "policies/*.py", "decoding/scheduling/**/*.py")

numba: Any
try:
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        raise ImportError
    with warnings.catch_warnings(record=True) as told:  # its own show a traceback for an odd variable
        numba = import_module("numba")
    for one in told:
        logger.warning("numba: %s", str(one.message).partition("\n")[0])
except ImportError:
    numba = None
except ValueError as error:  # NUMBA_NUM_THREADS=0
    numba = None
    logger.warning(
        "numba cannot be loaded (%s): correct the variables of the environment that begin with NUMBA_", error
    )

IS_COMPILED = numba is not None
SLOW = (
    "numba is not installed or switched off, so the scheduler's loops run as Python: milliseconds a step instead of "
    "microseconds. pip install numba"
)


def compiled(function: Function) -> Function:
    """Compile the function at its first call with arguments of new types; the identity without numba.

    A compiled function makes no arrays: it writes into those that it is given. Numba then counts no references to them
    (`_nrt`), which would take ten times as long as the loops themselves. What other compiled functions call is compiled
    without a way in from Python, which saves a quarter of the time.
    """
    if numba is None:
        return function
    made: Function = _Compiled(function)  # type: ignore[assignment]
    return made


class _Compiled:
    """A compiled function: one for Python, made once Python calls it, and one for compiled callers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._for_callers = _kept("inner", function, no_cpython_wrapper=True, no_cfunc_wrapper=True)
        self.__name__, self.__doc__, self.__wrapped__ = function.__name__, function.__doc__, function

    @property
    def _numba_type_(self) -> Any:
        """What numba takes the function for where a compiled one names it."""
        return self._for_callers._numba_type_

    @cached_property
    def _for_python(self) -> Callable[..., Any]:
        made: Callable[..., Any] = _kept("", self.__wrapped__)
        return made

    def __call__(self, *arguments: Any) -> Any:
        return self._for_python(*arguments)


def _kept(folder: str, function: Callable[..., Any], **more: bool) -> Any:
    """Return the function, to be compiled, its machine code kept in this part of `machine_code_folder`.

    The parts must be two folders: numba would take code without a way in from Python for code with one.
    """
    before, parent = numba.config.CACHE_DIR, machine_code_folder()
    if not parent:
        return _jitted(function, **more)
    numba.config.CACHE_DIR = str(Path(parent, folder))  # looked at while the decorator runs; other users keep theirs
    try:
        return _jitted(function, cache=True, **more)
    finally:
        numba.config.CACHE_DIR = before


def _jitted(function: Function, **more: bool) -> Function:
    made: Function = numba.njit(nogil=True, _nrt=False, forceinline=True, **more)(function)
    return made


def kept_by_callers(function: Function) -> Function:
    """Compile a function that another function makes and that compiled ones alone call: its machine code is kept with
    theirs."""
    return function if numba is None else _jitted(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def inlined(function: Function) -> Function:
    """Compile as `compiled` does, for a function that returns a record or a tuple with one, which only callers can
    hold."""
    if numba is None:
        return function
    made: Function = numba.njit(inline="always", _nrt=False)(function)
    return made


def records(array: npt.NDArray[Any]) -> Records:
    """Return the structured array in the form in which the loops can write `array[i].field`: numba takes it as it is,
    and numpy as a record array."""
    return array if numba is not None else array.view(np.recarray)


@cache
def machine_code_folder() -> str:
    """Return a folder for the machine code of these sources; "" where none can be written."""
    digest = hashlib.blake2b(digest_size=8)
    for path in _sources():
        digest.update(path.read_bytes())
    folder = user_folder("LOPA_LOOPS_FOLDER", "loops") / digest.hexdigest()
    try:
        for part in (folder, folder / "inner"):
            part.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=part).close()
        if not all_kept(folder).exists() and shutil.disk_usage(folder).free < _LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        logger.warning(
            "%s: machine code of the scheduler's loops cannot be kept there (%s), so every start compiles them for "
            "some minutes: set LOPA_LOOPS_FOLDER to a folder that can be written, with %d MiB free",
            folder, error.strerror, _LEAST_FREE >> 20,
        )  # fmt: skip
        return ""
    return str(folder)


def all_kept(folder: Path) -> Path:
    """Return the file that lies in the folder of machine code once all that a start compiles is there.

    Numba keeps machine code by the place and the time of a source, so another checkout of the same sources has a file
    of its own.
    """
    stamps = "".join(f"{path} {path.stat().st_mtime_ns}\n" for path in _sources())
    return folder / f"has_all_{hashlib.blake2b(stamps.encode(), digest_size=8).hexdigest()}"


def _sources() -> list[Path]:
    root = Path(__file__).parent
    return [path for pattern in _SOURCES for path in sorted(root.glob(pattern))]
