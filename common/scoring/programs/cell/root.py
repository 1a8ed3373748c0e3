"""A root folder of its own: the interpreter's libraries, read-only, five harmless devices, and 16 MiB to write into.

It is gone with the last process that sees it. Nothing of the user's is in it.
"""

# pathlib takes longer to load than everything else here.
# ruff: noqa: PTH102, PTH110, PTH112, PTH114, PTH115, PTH120, PTH123, PTH211

from __future__ import annotations

import os

from . import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

NOBODY = 65534
WORK_FOLDER = "/answer"  # not /tmp, where libraries may lie
WORK_OPTIONS = "size=16m,nr_inodes=4096,mode=0700"

_ROOT = "/proc"  # every machine has it, no library lies in it, and it should not be seen anyway
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/nix/store", "/gnu/store", "/etc/ld.so.cache", "/etc/alternatives",
           "/etc/localtime")  # fmt: skip
_DEVICES = ("null", "zero", "full", "random", "urandom")


def leave() -> int:
    """Enter a new pid namespace, without privilege by a new user namespace; the children are in it. Return the user to
    become inside."""
    try:
        kernel.unshare(kernel.NEW_PIDS)
        return NOBODY
    except OSError:
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(kernel.NEW_USER | kernel.NEW_PIDS)
    # A user other than 0 gets no capabilities back by starting a program.
    inside = user or NOBODY
    for name, line in (("setgroups", "deny"), ("uid_map", f"{inside} {user} 1"), ("gid_map", f"{inside} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    return inside


def enter(user: int, libraries: Iterable[str]) -> None:
    """Make the root, change to it, and stand in its empty work folder."""
    kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_NET | kernel.NEW_IPC)
    kernel.mount("none", "/", None, kernel.WITH_SUBMOUNTS | kernel.PRIVATE)
    kernel.mount("tmpfs", _ROOT, "tmpfs", kernel.NO_SETUID | kernel.NO_DEVICES, "size=1m,mode=0755")
    for folder in (WORK_FOLDER, "/dev"):
        os.mkdir(_ROOT + folder)
    bound: list[str] = []
    for path in (*_SYSTEM, *libraries):
        _bind(path, bound)
    for name in _DEVICES:
        _make_file(f"{_ROOT}/dev/{name}")
    kernel.make_read_only(_ROOT)
    for name in _DEVICES:
        kernel.mount(f"/dev/{name}", f"{_ROOT}/dev/{name}", None, kernel.BIND)
    options = f"{WORK_OPTIONS},uid={user},gid={user}"
    kernel.mount("tmpfs", _ROOT + WORK_FOLDER, "tmpfs", kernel.NO_SETUID | kernel.NO_DEVICES, options)
    os.chroot(_ROOT)
    os.chdir(WORK_FOLDER)


def _bind(path: str, bound: list[str]) -> None:
    if not os.path.exists(path):
        return
    real = _make_way(path, bound)
    if not _is_below(real, bound):
        bound.append(real)
        kernel.mount(real, _ROOT + real, None, kernel.BIND | kernel.WITH_SUBMOUNTS)
        kernel.make_read_only(_ROOT + real)


def _make_way(path: str, bound: list[str]) -> str:
    """Return the real path. Inside it has a place to be bound at, and the links that lead there."""
    real = ""
    parts = path.split("/")[::-1]
    while parts:
        part = parts.pop()
        if part == "..":
            real = os.path.dirname(real)
        elif part not in ("", "."):
            step = f"{real}/{part}"
            if os.path.islink(step):
                link = os.readlink(step)
                if not _is_below(step, bound) and not os.path.lexists(_ROOT + step):
                    os.symlink(link, _ROOT + step)
                real = "" if link.startswith("/") else real
                parts += link.split("/")[::-1]
            else:
                real = step
                _make_place(real, bound)
    return real


def _make_place(real: str, bound: list[str]) -> None:
    if _is_below(real, bound) or os.path.lexists(_ROOT + real):
        return
    if os.path.isdir(real):
        os.mkdir(_ROOT + real)
    else:
        _make_file(_ROOT + real)


def _make_file(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def _is_below(path: str, folders: list[str]) -> bool:
    return any(f"{path}/".startswith(f"{folder}/") for folder in folders)
