"""The CUDA driver's calls that torch has none for: modules, tensor maps, launches with clusters and PDL.

Structures and numbers are those of cuda.h.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.errors import EngineError

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...
_SWIZZLE_128B, _PROMOTE_256B = 3, 3
_DATA_TYPES = {torch.bfloat16: 9, torch.int8: 0, torch.float8_e4m3fn: 0}  # BFLOAT16, UINT8
_MAP_BYTES = _MAP_ALIGNMENT = 128


class _Value(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("bytes", ctypes.c_char * 64))


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", _Value))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Function(NamedTuple):
    handle: ctypes.c_void_p
    module: ctypes.c_void_p
    shared_bytes: int


def load(cubin: bytes, name: str, shared_bytes: int) -> Function:
    """Load a kernel of a cubin on this process's device. shared_bytes: shared memory that every program takes."""
    driver, module, handle = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    torch.cuda.current_stream()  # makes the device's context current
    _check(driver.cuModuleLoadData(ctypes.byref(module), cubin))
    _check(driver.cuModuleGetFunction(ctypes.byref(handle), module, name.encode()))
    _check(driver.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes))
    return Function(handle, module, shared_bytes)


def tensor_map(x_RK: Tensor, box_rows: int, box_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """How the device fetches boxes of a contiguous matrix into shared memory, in the 128-byte swizzle. What lies
    outside the matrix is fetched as zeros."""
    rows, depth = x_RK.shape
    element = x_RK.element_size()
    room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    offset = -ctypes.addressof(room) % _MAP_ALIGNMENT
    found: ctypes.Array[ctypes.c_char] = (ctypes.c_char * _MAP_BYTES).from_buffer(room, offset)
    _check(
        _driver().cuTensorMapEncodeTiled(
            found, _DATA_TYPES[x_RK.dtype], 2, ctypes.c_void_p(x_RK.data_ptr()),
            (ctypes.c_uint64 * 2)(depth, rows), (ctypes.c_uint64 * 1)(depth * element),
            (ctypes.c_uint32 * 2)(box_bytes // element, box_rows), (ctypes.c_uint32 * 2)(1, 1),
            0, _SWIZZLE_128B, _PROMOTE_256B, 0,
        )
    )  # fmt: skip
    return found


def launch(function: Function, num_programs: int, num_threads: int, arguments: list[Any]) -> None:
    """Launch on torch's current stream, overlapped with what runs there (PDL). arguments: ctypes values and tensor
    maps."""
    attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=_Value(number=1))
    config = _LaunchConfig(
        num_programs, 1, 1, num_threads, 1, 1, function.shared_bytes, torch.cuda.current_stream().cuda_stream,
        ctypes.pointer(attribute), 1,
    )  # fmt: skip
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    _check(_driver().cuLaunchKernelEx(ctypes.byref(config), function.handle, addresses, None))


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise EngineError(f"the CUDA driver: {text.value.decode() if text.value else status}")
