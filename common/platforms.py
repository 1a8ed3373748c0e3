"""The one table of platforms, by which the common rooms reach a kind of hardware.

A platform is an object of few functions that an engine package provides. Nothing else in `common` knows an engine.
To add one: a package with a module `platforms` whose `PLATFORMS` lists its objects, and that module's name in
`_PROVIDERS` (examples/third_platform.py is a whole one).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common.errors import ConfigError, EngineError, MissingCapability, first_line, is_out_of_memory

if TYPE_CHECKING:
    from common.config import DeviceProfile, RunConfig
    from common.decoding import Engine

logger = logging.getLogger(__name__)

# By name, since engines import this package. `engine: auto` means the first platform that has the device.
_PROVIDERS = ("lopa_cuda.platforms", "lopa_ascend.platforms")
_MOST_KERNELS = 100  # in a profile's table


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report. `is_ok` None: a remark, nothing to judge."""

    subject: str
    detail: str
    is_ok: bool | None = None


class GroupBackends(NamedTuple):
    """torch.distributed back ends, such as `cpu:gloo,cuda:nccl`. axes: that of the mesh axes' groups, if it differs."""

    default: str
    axes: str | None = None


class TuneOptions(NamedTuple):
    """What `lopa tune` measures. token_counts: ascending. output: a file, None: where engines read this user's tiles.
    is_overwriting: also what the file has."""

    token_counts: tuple[int, ...]
    output: str | None = None
    is_overwriting: bool = False


class Platform:
    """One engine on one kind of device. What is not overridden holds for a CPU."""

    engine: str
    device: str
    visible_devices_variable: str | None = None
    auto_tensor_parallel_size = 1  # for `mesh: auto`, where it divides the devices
    needs_devices_at_start = False  # a missing driver would show as a traceback wherever it is touched first

    def num_visible_devices(self) -> int:
        """Devices of this kind that this node can see; a CPU counts as one."""
        return 1

    def memory_bytes(self) -> int | None:
        """The memory of one device; None: not known before it is opened."""
        return None

    def require_devices(self, profile: DeviceProfile, num_here: int) -> None:
        """Raises ConfigError or MissingCapability unless this node can run that many processes of the profile."""

    def group_backends(self) -> GroupBackends:
        return GroupBackends("gloo")

    def build_engine(self, profile: DeviceProfile, run: RunConfig) -> Engine:
        """The engine with the run's model loaded, by its package's `assemble`. Raises MissingCapability, ConfigError or
        EngineError."""
        # Here: a launcher, and `lopa doctor`, look a platform up and have no reason to load operators.
        engine: Engine = import_module(f"{self.engine}.assemble").assemble(profile, run)
        return engine

    def versions(self) -> dict[str, str | None]:
        """Driver and libraries of this device, for `lopa doctor` and result files; None: not found."""
        return {}

    def requirements(self, profile: DeviceProfile, num_processes: int, num_here: int) -> Iterator[Finding]:
        """What the profile needs beside its devices, each judged. num_here: processes on each node."""
        if num_processes > 1:
            # Here: a launcher looks a platform up and has no reason to load torch.
            import torch.distributed as dist

            yield Finding("collectives", "gloo", dist.is_gloo_available())

    def selftest(self, profile: DeviceProfile, model: str | None = None) -> Sequence[Finding]:
        """Every operation on the device beside its plain version. Raises ConfigError where there is none.

        model: the folder whose linears decide what is called.
        """
        raise ConfigError("--selftest is for profiles of device npu: add --profile ascend_910c_tp4_bp4")

    @contextmanager
    def profiled(self, folder: Path) -> Iterator[None]:
        """Write what host and device do inside the block into an existing folder: `trace.json`, for Perfetto, and
        `kernels.txt`, the operations by their time. Raises MissingCapability where there is no profiler."""
        from torch.profiler import profile

        with profile() as profiler:
            yield
        profiler.export_chrome_trace(str(folder / "trace.json"))
        by = "self_cpu_time_total" if self.device == "cpu" else "self_device_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=_MOST_KERNELS, max_name_column_width=80)
        (folder / "kernels.txt").write_text(table, encoding="utf-8")

    def tune(self, profile: DeviceProfile, run: RunConfig, options: TuneOptions) -> Iterator[str]:
        """Tiles of the run's model, measured on this device; a line for every finding. Raises ConfigError where the
        engine has none, ConfigError, MissingCapability or EngineError where they cannot be measured."""
        raise ConfigError(
            f"profile {profile.name} is for device {profile.device}, and only CUDA kernels have tiles to tune: name a "
            "profile of a GPU, such as --profile cuda"
        )


@cache
def all_platforms() -> tuple[Platform, ...]:
    return tuple(platform for name in _PROVIDERS for platform in import_module(name).PLATFORMS)


def platform_of_device(device: str) -> Platform:
    """The first platform of this kind of device."""
    return next(platform for platform in all_platforms() if platform.device == device)


def platform_of(profile: DeviceProfile) -> Platform:
    """What runs this profile, whether or not its devices are here; `engine: auto` is the first of its device."""
    if profile.engine == "auto":
        return platform_of_device(profile.device)
    wanted = (profile.engine, profile.device)
    return next(platform for platform in all_platforms() if (platform.engine, platform.device) == wanted)


def build_engine(profile: DeviceProfile, run: RunConfig) -> Engine:
    """The engine that the profile names, with the run's model loaded.

    Raises MissingCapability, ConfigError, or EngineError where memory does not suffice.
    """
    platform = platform_of(profile)
    if profile.engine == "auto":
        if platform.num_visible_devices() == 0:
            raise MissingCapability(
                f"profile {profile.name}: no {profile.device} device is visible on this machine; "
                "pick another profile, or run `lopa doctor` to see what is here"
            )
        logger.info("profile %s: engine auto is %s, for device %s", profile.name, platform.engine, profile.device)
    try:
        return platform.build_engine(profile, run)
    except RuntimeError as error:
        if isinstance(error, EngineError) or not is_out_of_memory(error):
            raise
        raise EngineError(
            f"{run.model} with max_num_requests {run.max_num_requests} and max_model_len {profile.max_model_len} does "
            f"not fit the memory of {profile.device} ({first_line(error)}): lower one of them, or use a "
            "mesh with a larger tensor_parallel_size"
        ) from error
