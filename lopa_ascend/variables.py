"""Variables of CANN and torch-npu that change what an engine can do: those that it refuses, in one list, and what they
make of its all-reduces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.config import DeviceProfile
from common.errors import ConfigError
from graphs.hccl import DETERMINISTIC, EXPANSION, most_aiv_tokens, sums_in_one_order

CAPTURING = ("npugraph", "npugraph_ex")
COMPILING = ("npugraph_ex", "torchair")


@dataclass(frozen=True, slots=True)
class Refused:
    """A variable's value that captured graphs cannot work with, and why."""

    name: str
    value: str
    why: str


REFUSED = (
    # NPUGraph.cpp: replay() then waits for the device, which waits for lengths that the host writes after it.
    Refused("ASCEND_LAUNCH_BLOCKING", "1", "waits for every launch, and a captured step would never end"),
    # NPUGraph.cpp: capture_begin checks it.
    Refused("TASK_QUEUE_ENABLE", "2", "makes torch-npu refuse captures"),
)


def check_variables(profile: DeviceProfile, environment: Mapping[str, str]) -> None:
    """Raise ConfigError where a variable's value and the profile's graph mode exclude each other."""
    if profile.device != "npu" or profile.graph.mode not in CAPTURING:
        return
    for refused in REFUSED:
        if environment.get(refused.name) == refused.value:
            raise ConfigError(
                f"{refused.name}={refused.value} {refused.why}: set graph.mode to eager to look for a fault, or unset "
                f"{refused.name}"
            )


def told_sums(tp_size: int, width: int, element_bytes: int, environment: Mapping[str, str]) -> str:
    """Say in a sentence up to which step all-reduces over `tp_size` ranks run on vector cores, and what a choice
    costs."""
    most = most_aiv_tokens(tp_size, width, element_bytes, environment)
    if most == 0:
        mode = environment.get(EXPANSION, "unset")
        return f"all-reduces go through HCCL's AI_CPU, several times as long as on vector cores: {EXPANSION} is {mode}"
    told = f"all-reduces of steps of up to {most} tokens run on vector cores, larger ones several times as long"
    if not sums_in_one_order(environment):
        return told
    otherwise = most_aiv_tokens(tp_size, width, element_bytes, {**environment, DETERMINISTIC: "false"})
    return f"{told}: {DETERMINISTIC} is {environment[DETERMINISTIC]}, with false it were up to {otherwise} tokens"
