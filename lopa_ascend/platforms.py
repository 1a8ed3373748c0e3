"""What this engine runs on: Ascend NPUs, and any CPU with plain operators in their place."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from platform import machine
from typing import TYPE_CHECKING

import common.platforms
from common.errors import MissingCapability
from common.platforms import Finding, GroupBackends
from common.version import release_of
from common.version import version_of as _package
from graphs.hccl import told_of_ports
from lopa_ascend.variables import CAPTURING

if TYPE_CHECKING:
    from common.config import DeviceProfile
    from lopa_ascend.selftest import Finding as SelftestFinding

# The first is that of CANN 8.5 and later.
_CANN_FOLDERS = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/latest")
_CANN_VERSION_FILES = ("version.cfg", f"{machine()}-linux/ascend_toolkit_install.info", "opp/version.info")
# What CANN's own Python code imports; torch-npu asks for none of it.
_OF_CANN = ("absl-py", "attrs", "cffi", "decorator", "pathlib2", "protobuf", "psutil", "requests", "scipy", "sympy")
_NPU_DRIVER = Path("/usr/local/Ascend/driver/version.info")
_IP_SETTINGS = Path("/proc/sys/net/ipv4")
_OLDEST_DRIVER = (25, 5, 1)  # earlier ones refuse captures ("sq cq")


class ReferenceCpu(common.platforms.Platform):
    engine = "lopa_ascend"
    device = "cpu"


class Npu(ReferenceCpu):
    """Imports modules that touch torch_npu in the functions: most commands run without it."""

    device = "npu"
    visible_devices_variable = "ASCEND_RT_VISIBLE_DEVICES"
    auto_tensor_parallel_size = 4  # two packages of two dies each
    needs_devices_at_start = True

    def num_visible_devices(self) -> int:
        from lopa_ascend.ops import num_visible_devices

        return num_visible_devices()

    def require_devices(self, profile: DeviceProfile, num_here: int) -> None:
        from lopa_ascend.ops import require_devices

        require_devices(num_here)

    def group_backends(self) -> GroupBackends:
        # The axes' groups are of HCCL alone: of a group with a second backend torchair lowers no usable name.
        return GroupBackends("cpu:gloo,npu:hccl", "hccl")

    def versions(self) -> dict[str, str | None]:
        return {"torch-npu": _package("torch-npu"), "CANN": _cann(), "NPU driver": _first_version(_NPU_DRIVER)}

    def requirements(self, profile: DeviceProfile, num_processes: int, num_here: int) -> Iterator[Finding]:
        torch_version, npu_version = _package("torch") or "", _package("torch-npu")
        yield Finding("torch_npu", npu_version or "not installed: pip install -e '.[ascend]'", npu_version is not None)
        if npu_version is not None:
            is_match = release_of(torch_version) == release_of(npu_version)
            fix = "the same release" if is_match else "must be the same release: pip install -e '.[ascend]'"
            yield Finding("versions", f"torch {torch_version}, torch_npu {npu_version}: {fix}", is_match)
        cann, reason = _cann(), self._why_no_devices(profile, num_here)
        fix = "not found: install the toolkit, or source /usr/local/Ascend/cann/set_env.sh (ascend-toolkit before 8.5)"
        # Where torch-npu loads it, CANN is there, whatever folder holds its version.
        yield Finding("CANN", cann or fix if reason else cann or "loaded", cann is not None or reason is None)
        if missing := [name for name in _OF_CANN if _package(name) is None]:
            yield Finding("CANN's Python", f"imports {', '.join(missing)}, not installed: pip install -e '.[ascend]'")
        yield Finding("start", reason or "torch-npu loads, and its devices answer", reason is None)
        if profile.graph.mode == "torchair":
            yield _torchair_needs()
        if profile.graph.mode in CAPTURING and (told := _told_of_driver(_first_version(_NPU_DRIVER))):
            yield Finding("NPU driver", told)
        if num_processes > 1 and (told := told_of_ports(os.environ, _IP_SETTINGS)):
            yield Finding("ports", told)
        if num_processes > 1 and (told := _told_of_user()):
            yield Finding("user", told)

    def selftest(self, profile: DeviceProfile, model: str | None = None) -> Sequence[Finding]:
        from lopa_ascend.selftest import examine_alone

        return [_told(finding) for finding in examine_alone(profile, model)]

    @contextmanager
    def profiled(self, folder: Path) -> Iterator[None]:
        """Write torch-npu's own files: `*_ascend_pt/ASCEND_PROFILER_OUTPUT` with trace_view.json, kernel_details.csv
        (a line a kernel) and op_statistic.csv."""
        from torch_npu import profiler

        # Level 1 has kernels of collectives, and how busy each unit of a core was.
        level = profiler._ExperimentalConfig(profiler_level=profiler.ProfilerLevel.Level1)
        activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
        ready = profiler.tensorboard_trace_handler(str(folder))
        with profiler.profile(activities=activities, on_trace_ready=ready, experimental_config=level):
            yield
        if not list(folder.glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT/kernel_details.csv")):
            raise MissingCapability(
                f"{folder}: torch-npu's profiler has left no table of kernels there: it needs CANN's msprof on PATH"
            )

    def _why_no_devices(self, profile: DeviceProfile, num_here: int) -> str | None:
        """The sentence that a run of this profile would end with; None: it would find its devices."""
        try:
            self.require_devices(profile, num_here)
        except MissingCapability as error:
            return str(error)
        return None


def _told(finding: SelftestFinding) -> Finding:
    """A finding of the self-test as a line of a report. An operation that is wrong and not called is not judged."""
    is_just_said = finding.is_useless and not finding.is_called
    return Finding(finding.name, finding.sentence, None if is_just_said else not finding.is_useless)


def _torchair_needs() -> Finding:
    protobuf = _package("protobuf")
    detail = "comes with torch_npu, and needs protobuf"
    fix = f"{detail}, which is not installed: pip install -e '.[ascend]'"
    return Finding("torchair", f"{detail}: {protobuf}" if protobuf else fix, protobuf is not None)


def _told_of_user() -> str | None:
    """What HCCL has to expect of the user of this process; None: nothing."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return (
            f"{os.getuid()} has no line in /etc/passwd, which HCCL wants (else ra init failed, error code 19): add one "
            "to the image, or run as a user of it (runAsUser: 10001 in these images)"
        )
    return None


def _told_of_driver(version: str | None) -> str | None:
    """What captured graphs have to expect of the driver; None: nothing, or it does not say which it is."""
    number = re.search(r"(?i)\bversion=(\d+(?:\.\d+)+)", version or "")
    if number is None or tuple(map(int, number[1].split("."))) >= _OLDEST_DRIVER:
        return None
    oldest = ".".join(map(str, _OLDEST_DRIVER))
    return f"{number[1]} has room for few graphs, and other shapes run uncaptured: install HDK {oldest} or later"


def _cann() -> str | None:
    folders = [os.environ.get("ASCEND_TOOLKIT_HOME", ""), *_CANN_FOLDERS]
    paths = [Path(folder) / name for folder in folders if folder for name in _CANN_VERSION_FILES]
    return next((version for path in paths if (version := _first_version(path))), None)


def _first_version(path: Path) -> str | None:
    if not path.is_file():
        return None
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = next((line for line in lines if "version" in line.lower()), None)
    return f"{found.strip()} ({path})" if found else str(path)


PLATFORMS = (ReferenceCpu(), Npu())
