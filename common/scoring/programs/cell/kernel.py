"""What Python has no function for and Linux does: each call raises OSError that names it."""

from __future__ import annotations

import ctypes
import errno
import os

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SETUID, NO_DEVICES, REMOUNT, BIND, WITH_SUBMOUNTS, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18

_SIGKILL = 9
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 1, 4, 38
_CAPABILITIES_3 = 0x20080522
_MOUNT_SETATTR = 442  # the same on every architecture that both runs Python and is younger than Alpha
_AT_CURRENT_FOLDER, _AT_RECURSIVE = -100, 0x8000
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library that tells of a failure by -1."""
    try:
        function = getattr(_libc, name)
    except AttributeError:
        raise OSError(f"{name}: not in this C library") from None
    if function(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def control(option: int, value: int) -> None:
    call("prctl", option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def die_with_parent(parent: int) -> None:
    """Die when the parent does, also if it has just done so. 0 is a parent outside of the pid namespace."""
    control(_SET_DEATH_SIGNAL, _SIGKILL)
    if os.getppid() not in (parent, 0):
        os._exit(1)


def hide_memory() -> None:
    """Allow no core file, whatever pattern the machine has for them, and no tracing by the user's other processes."""
    control(_SET_DUMPABLE, 0)


def give_up_privileges() -> None:
    """Give up every capability, and get none by starting a program that has some."""
    control(_SET_NO_NEW_PRIVILEGES, 1)
    call("capset", (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)())


def unshare(namespaces: int) -> None:
    call("unshare", namespaces)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    kind_or_null = None if kind is None else kind.encode()
    call("mount", source.encode(), target.encode(), kind_or_null, ctypes.c_ulong(flags), options.encode())


def make_read_only(target: str) -> None:
    """Make a mount and all below it read-only; before Linux 5.12 the mount itself, so this is called for each that is
    made."""
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY | NO_SETUID | NO_DEVICES, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    numbers = (ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(_AT_CURRENT_FOLDER))
    try:
        call("syscall", *numbers, target.encode(), ctypes.c_uint(_AT_RECURSIVE), ctypes.byref(attributes), size)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        mount("none", target, None, REMOUNT | BIND | READ_ONLY | NO_SETUID | NO_DEVICES)
