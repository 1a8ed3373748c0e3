"""From what a command line names to settings: MODEL, --profile and --set, and what they leave open found out here.

Nothing here loads torch, so that variables of a profile are there before it is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from common.config import DeviceProfile, RunConfig, find_config, load_profile, load_profile_and_run
from common.platforms import platform_of_device
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
    profile: str | None, model: str, overrides: Sequence[str] | None, *, takes_many: bool = False
) -> tuple[DeviceProfile, RunConfig]:
    """What runs the model, and what is decoded. What was found out is logged in a line. Raises ConfigError.

    model: as `find_config` takes runs. takes_many: decode several requests at once where nothing says how many.
    """
    path, name, given = find_config("runs", model), profile or profile_here(), list(overrides or [])
    device_profile, run = load_profile_and_run(name, path, given)
    is_open = profile is None or path.is_dir()
    found = _for_quantized(device_profile, run)
    found += _for_block_causal(device_profile, run) if is_open else []
    found += _for_this_cpu(device_profile, run) if profile is None else []
    if found:
        device_profile, run = load_profile_and_run(name, path, [*found, *given])
    if takes_many and "max_num_requests" not in run.model_fields_set and not run.decode.strategy.reuses_prefix:
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
    num_bytes = _weights(Path(run.model))
    if profile.device != "cpu" or num_bytes < _SMALL:
        return []
    threads = f"environment.OMP_NUM_THREADS={len(os.sched_getaffinity(0))}"
    is_tight = 2 * num_bytes > 0.7 * memory_bytes()  # files have two bytes a weight, float32 four
    return [threads, "dtype=bfloat16"] if is_tight else [threads]


def memory_bytes() -> int:
    """This machine's main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _weights(folder: Path) -> int:
    """Bytes of a model's weights; 0 where there are none to see."""
    try:
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    except (OSError, ValueError):
        return 0


def _sentence(model: str, profile: DeviceProfile, run: RunConfig) -> str:
    preset = f"preset {run.preset}" if run.preset else f"strategy {run.decode.strategy.name}"
    at_once = f"{counted(run.max_num_requests, 'request')} at once"
    in_8_bits = f" with {profile.quantization}" if profile.quantization else ""
    return (
        f"{model} on {profile.device} (profile {profile.name}) in {profile.dtype}{in_8_bits}: {preset}, "
        f"k = {run.decode.num_lookahead}, {at_once}; options say otherwise (--help)"
    )
