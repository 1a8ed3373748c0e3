"""Compiles CUDA C++ to a cubin by NVRTC, which torch brings along; kept in the user's cache folder.

A cubin is looked up by its source, the architecture and NVRTC's version, so nothing in the folder goes stale.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import sys
from pathlib import Path

import torch

from common.errors import EngineError
from common.user_files import user_folder, write_whole

FOLDER_VARIABLE = "LOPA_CUBINS"
_OPTIONS = ("-std=c++17", "-default-device", "--extra-device-vectorization")


def compiled(source: str, architecture: str) -> bytes:
    """The cubin of `source` for an architecture such as `sm_90a`. Raises EngineError with the compiler's words."""
    nvrtc = _nvrtc()
    assert nvrtc is not None, "why_unavailable has been asked"
    key = hashlib.sha256("\0".join([source, architecture, *_OPTIONS, _version(nvrtc)]).encode()).hexdigest()
    path = user_folder(FOLDER_VARIABLE, "cubins") / f"{key}.cubin"
    kept = _kept(path)
    if kept is not None:
        return kept
    cubin = _compile(nvrtc, source, architecture)
    _keep(path, cubin)
    return cubin


def is_available() -> bool:
    return _nvrtc() is not None


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """The NVRTC of torch's CUDA version, as torch installs it or as the system has it."""
    if torch.version.cuda is None:
        return None
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    installed = (path for folder in sys.path for path in Path(folder).glob(f"nvidia/*/lib/{name}"))
    path = next(installed, None)
    try:
        for needed in path.parent.glob("libnvrtc-builtins.so.*") if path else ():  # which it opens by name
            ctypes.CDLL(str(needed))
        return ctypes.CDLL(str(path or name))
    except OSError:
        return None


def _version(nvrtc: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def _compile(nvrtc: ctypes.CDLL, source: str, architecture: str) -> bytes:
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"linear.cu", 0, None, None))
    try:
        given = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in _OPTIONS)]
        status = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        if status:
            log = _text(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0\n ")
            raise EngineError(f"NVRTC {_version(nvrtc)} cannot compile a linear's tile for {architecture}: {log}")
        return _text(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise EngineError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status).decode()}")


def _kept(path: Path) -> bytes | None:
    """The kept cubin; None where it is missing, or not a whole file."""
    try:
        cubin = path.read_bytes()
    except OSError:
        return None
    return cubin if cubin.startswith(b"\x7fELF") else None


def _keep(path: Path, cubin: bytes) -> None:
    """Keep the cubin. Without a folder to write to it is compiled again next time."""
    with contextlib.suppress(OSError):
        write_whole(path, cubin)
