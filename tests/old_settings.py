"""Settings by the names that they had before strategies and rules took their own: how the oracle, recorded values and
golden traces call them."""

from __future__ import annotations

from typing import Any

from common.config import DecodeConfig, DeviceProfile


def flat(decode: DecodeConfig) -> dict[str, Any]:
    """Return all settings of `decode` by their old names."""
    return decode.model_dump(mode="json")


def flat_profile(profile: DeviceProfile) -> dict[str, Any]:
    """Return all settings of a profile by their old names, sections as `mesh.tensor_parallel_size`."""
    found: dict[str, Any] = {}
    for name, value in profile.model_dump(mode="json").items():
        is_section = isinstance(value, dict) and name != "environment"
        found |= {f"{name}.{key}": each for key, each in value.items()} if is_section else {name: value}
    return found
