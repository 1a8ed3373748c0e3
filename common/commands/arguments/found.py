"""Make settings of a command line: MODEL, --profile and --set; what they leave open is found out here.

Nothing here loads torch, so that variables of a profile are there before it is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

from common.config import DeviceProfile, RunConfig, find_config, load_profile, load_profile_and_run
from common.errors import ConfigError
from common.hub import known_as, name_of, weight_bytes
from common.platforms import platform_of, platform_of_device
from common.processes import resolve_mesh
from common.tables import counted
from quant.layout import is_quantized_folder

logger = logging.getLogger(__name__)

# What the driver of a kind of device makes: without it torch has no reason to be asked.
_DRIVERS = {"cuda": Path("/dev/nvidiactl"), "npu": Path("/dev/davinci_manager")}
# Whose cache is paged, so that requests wait where memory does not hold all of them; a CPU's work grows with each.
_AT_ONCE = {"cpu": 8, "cuda": 16, "npu": 16}
_BLOCK_CAUSAL = {"window_attention": "block_causal", "shift_row": "fresh", "spawn_rule": "confident(blocks=1)"}
_SMALL = 256 * 2**20  # bytes of weights whose matrices are too small for several threads


@cache
def profile_here() -> str:
    """The shipped profile of one process that fits this machine: that of a device it has, else `cpu`."""
    present = (device for device, driver in _DRIVERS.items() if driver.exists())
    return next((device for device in present if platform_of_device(device).num_visible_devices()), "cpu")


def load_profile_or_found(profile: str | None, overrides: Sequence[str] = ()) -> DeviceProfile:
    """The named profile, else that of this machine. Raises ConfigError."""
    return load_profile(profile or profile_here(), overrides)


def load_both(
    profile: str | None, model: str, overrides: Sequence[str] | None, *, takes_many: bool = False,
    with_weights: bool = True,
) -> tuple[DeviceProfile, RunConfig]:  # fmt: skip
    """What runs the model, and what is decoded. What was found out is logged in a line. Raises ConfigError.

    model: as `find_config` takes runs. takes_many: decode several requests at once where nothing says how many.
    with_weights: fetch those of a hub's repository, if memory has room for them.
    """
    name, given = profile or profile_here(), list(overrides or [])
    load = partial(load_profile_and_run, name, model)
    device_profile, run = load(given, with_weights=False)
    is_open = profile is None or find_config("runs", model).is_dir()
    found = _for_quantized(device_profile, run)
    found += _for_block_causal(device_profile, run) if is_open else []
    found += _for_this_cpu(device_profile, run) if profile is None else []
    if found:
        device_profile, run = load([*found, *given], with_weights=False)
    if with_weights and any(name_of(folder) for folder in (run.model, run.lora_path or "")):
        _require_memory(device_profile, run)
        device_profile, run = load([*found, *given])
    if takes_many and "max_num_requests" not in run.model_fields_set:
        run = run.model_copy(update={"max_num_requests": _AT_ONCE[device_profile.device]})
    if is_open:
        logger.info("%s", _sentence(model, device_profile, run))
    return device_profile, run


def _for_quantized(profile: DeviceProfile, run: RunConfig) -> list[str]:
    """Overrides for a model that is in 8 bits already, under a profile that says nothing of it."""
    is_open = "quantization" not in profile.model_fields_set and run.load_format == "auto"
    return ["quantization=w8a8"] if is_open and is_quantized_folder(run.model) else []


def _for_block_causal(profile: DeviceProfile, run: RunConfig) -> list[str]:
    """Overrides for an engine whose d2f has block-causal windows alone, as in configs/runs/demo_block_causal.yaml."""
    if profile.engine != "lopa_ascend" or run.decode.strategy.name != "d2f":
        return []
    unsaid = _BLOCK_CAUSAL.keys() - run.decode.model_fields_set
    return [f"decode.{key}={_BLOCK_CAUSAL[key]}" for key in sorted(unsaid)]


def _for_this_cpu(profile: DeviceProfile, run: RunConfig) -> list[str]:
    """Overrides for weights that are large for a CPU: all of its cores, and half the bytes where memory needs that."""
    num_bytes = weight_bytes(run.model)
    if profile.device != "cpu" or num_bytes < _SMALL:
        return []
    threads = f"environment.OMP_NUM_THREADS={len(os.sched_getaffinity(0))}"
    is_tight = 2 * num_bytes > 0.7 * memory_bytes()  # files have two bytes a weight, float32 four
    return [threads, "dtype=bfloat16"] if is_tight else [threads]


def _require_memory(profile: DeviceProfile, run: RunConfig) -> None:
    """Raise ConfigError where a repository's weights are more than the device has memory for, before they are
    fetched. Files have two bytes a weight."""
    memory = memory_bytes() if profile.device == "cpu" else platform_of(profile).memory_bytes()
    if memory is None or run.load_format == "dummy":
        return
    bytes_each = 1 if profile.quantization is not None else 4 if profile.dtype == "float32" else 2
    ranks = resolve_mesh(profile).tensor_parallel_size
    needed = weight_bytes(run.model) / 2 * bytes_each / ranks
    if needed > memory:
        raise ConfigError(
            f"{known_as(run.model)}: its weights take {needed / 2**30:.1f} GiB in {profile.dtype} on each "
            f"of {counted(ranks, 'rank')}, and {profile.device} has {memory / 2**30:.1f} GiB: take a profile with a "
            "larger tensor_parallel_size, or a smaller dtype"
        )


def memory_bytes() -> int:
    """This machine's main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _sentence(model: str, profile: DeviceProfile, run: RunConfig) -> str:
    preset = f"preset {run.preset}" if run.preset else f"strategy {run.decode.strategy.name}"
    at_once = f"{counted(run.max_num_requests, 'request')} at once"
    in_8_bits = f" with {profile.quantization}" if profile.quantization else ""
    return (
        f"{model} on {profile.device} (profile {profile.name}) in {profile.dtype}{in_8_bits}: {preset}, "
        f"k = {run.decode.num_lookahead}, {at_once}; options change this (--help)"
    )
