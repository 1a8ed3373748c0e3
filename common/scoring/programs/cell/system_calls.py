"""The system calls that a program has no use for and others would suffer from, refused by a seccomp filter.

Refused is: another process or thread, any signal, looking into or slowing other processes, network, memory and queues
that outlive a process, namespaces and mounts. It binds root as well and needs no privilege, so it works in containers.
"""

from __future__ import annotations

import ctypes
import os
import struct

from . import kernel

# Numbers on x86_64 and aarch64, which has no such call where it is None.
REFUSED: dict[str, tuple[int, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "socket": (41, 198), "shmget": (29, 194),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    "chroot": (161, 51), "pivot_root": (155, 41), "io_uring_setup": (425, 425), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "reboot": (169, 142),
}  # fmt: skip
# A descriptor can be told to signal any process of the same user.
REFUSED_REQUESTS: dict[str, tuple[tuple[int, int], tuple[int, ...]]] = {
    "fcntl": ((72, 25), (8, 10, 15)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX
    "ioctl": ((16, 29), (0x8901, 0x8902, 0x5412)),  # FIOSETOWN, SIOCSPGRP, TIOCSTI
}
LIMITS_OF_ANY_PROCESS = {"prlimit64": (302, 261)}

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32_CALLS = 0x40000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | 1  # EPERM
_SET_SECCOMP, _MODE_FILTER = 22, 2


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.c_char_p))


def is_known() -> bool:
    """Whether the calls' numbers are known for this machine."""
    return os.uname().machine in _MACHINES


def install() -> None:
    """Install the filter for this process, for good. Raises OSError where machine or kernel has no such filter."""
    if not is_known():
        raise OSError(f"no table of system calls for {os.uname().machine}")
    instructions = _instructions(*_MACHINES[os.uname().machine])
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    filter_ = _Filter(len(instructions), program)
    arguments = (_MODE_FILTER, ctypes.addressof(filter_), 0, 0)
    kernel.call("prctl", _SET_SECCOMP, *map(ctypes.c_ulong, arguments))


_Instruction = tuple[int, int, int, int]  # code, instructions to skip if so, if not, operand


def _instructions(machine: int, architecture: int) -> list[_Instruction]:
    filter_ = [(_LOAD, 0, 0, _ARCHITECTURE), (_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    filter_ += [(_LOAD, 0, 0, _NUMBER), (_IF_AT_LEAST, 0, 1, _X32_CALLS), (_RETURN, 0, 0, _REFUSE)]
    for numbers in REFUSED.values():
        number = numbers[machine]
        if number is not None:
            filter_ += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    for both, requests in REFUSED_REQUESTS.values():
        checks = [step for request in requests for step in ((_IF_EQUAL, 0, 1, request), (_RETURN, 0, 0, _REFUSE))]
        filter_ += _if_call(both[machine], _SECOND_ARGUMENT, checks)
    of_itself = [(_IF_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _REFUSE)]
    filter_ += _if_call(LIMITS_OF_ANY_PROCESS["prlimit64"][machine], _FIRST_ARGUMENT, of_itself)
    return [*filter_, (_RETURN, 0, 0, _ALLOW)]


def _if_call(number: int, argument: int, checks: list[_Instruction]) -> list[_Instruction]:
    inside = [(_LOAD, 0, 0, argument), *checks, (_LOAD, 0, 0, _NUMBER)]
    return [(_IF_EQUAL, 0, len(inside), number), *inside]
