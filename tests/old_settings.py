"""Settings by the names that they had before strategies and rules took their own: how the oracle, recorded values and
golden traces call them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from common.config import DecodeConfig, DeviceProfile
from common.policies import parsed

_OF_STRATEGY = {
    "cache": "prefix", "commit": "fused", "cache_delay": 0, "sub_block_size": None, "edit_threshold": None,
    "max_post_edit_steps": 16, "penalty_lambda": 0.0, "cfg_scale": 0.0, "min_block_steps": 1, "max_block_steps": None,
    "reuse_prefix": False, "end_at": "token",
}  # fmt: skip
# Setting -> its rules' numbers: the old name, and the value where the rule says none.
_NUMBERS = {
    "fill_rule": {
        "steps": ("denoising_steps", None), "bound": ("entropy_bound", 0.35), "below": ("entropy_threshold", 0.5),
        "f": ("factor", 1.0),
    },
    "branch_score": {"bottom_share": ("bottom_share", 1.0), "created": ("creation_weight", 0.0)},
    "spawn_rule": {"blocks": ("spawn_blocks", "all"), "entropy": ("spawn_entropy", 1e6)},
}  # fmt: skip
_NPU = ("row_buckets", "max_graphs", "length_updates", "cache_dir")  # that were of `graph`


def flat(decode: DecodeConfig) -> dict[str, Any]:
    """Return all settings of `decode` by their old names."""
    found = decode.model_dump(mode="json", exclude={"strategy"})
    found["strategy"] = decode.strategy.name
    for name, value in _OF_STRATEGY.items():
        found[name] = getattr(decode.strategy, name, value)
    for setting, moved in _NUMBERS.items():
        rule, numbers = parsed(found[setting])
        for number, (old, value) in moved.items():
            found[old] = numbers.pop(number, value)
        others = ", ".join(f"{name}={value:g}" for name, value in numbers.items())
        found[setting] = f"{rule}({others})" if others else rule
    del found["spawn_entropy"]  # never had an old name
    found["spawn_blocks"] = "all" if found["spawn_blocks"] == "all" else "first"
    found["denoising_steps"] = None if found["denoising_steps"] is None else int(found["denoising_steps"])
    return found


class _Name(str):
    @property
    def is_from_zero(self) -> bool:
        return self in ("block_diffusion", "fast_dllm_v2")


class Flat(SimpleNamespace):
    """The settings of a request as the oracle reads them."""

    def __init__(self, decode: DecodeConfig) -> None:
        own = {"strategy": _Name(decode.strategy.name), "stop": decode.stop, "stop_token_ids": decode.stop_token_ids}
        own["spawn_entropy"] = parsed(decode.spawn_rule)[1].get("entropy", float("inf"))
        super().__init__(**{**flat(decode), **own})


def flat_profile(profile: DeviceProfile) -> dict[str, Any]:
    """Return all settings of a profile by their old names, sections as `mesh.tensor_parallel_size`."""
    found: dict[str, Any] = {"enforce_eager": False, "processes_per_node": None}
    for name, value in profile.model_dump(mode="json").items():
        if name == "npu":
            found |= {f"graph.{key}" if key in _NPU else key: each for key, each in value.items()}
        elif isinstance(value, dict) and name != "environment":
            found |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            found[name] = value
    return found
