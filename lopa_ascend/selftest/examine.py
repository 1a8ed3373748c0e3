"""Before a device serves: every operation against its CPU twin at the engine's shapes, attention as the graph mode runs
it, and the collectives of each axis.

Some CANN releases compute wrong results without a word (docs/ascend.md names the reports), and no simulation can tell.
So an engine on npu runs this when it starts, and refuses to go on where an operator is wrong; `lopa doctor --selftest`
runs it alone. Inputs are drawn on the CPU and copied, so that both sides compute on the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from common.config import DeviceProfile
from common.errors import MissingCapability
from common.processes import Mesh, resolve_mesh
from lopa_ascend.ops import Ops, load_torch_npu, npu_ops, require_devices
from lopa_ascend.ops.versions import cann_version
from lopa_ascend.selftest.checks import CHECKS, GRAPH_CHECKS, Bench, Sizes, all_reduce

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finding:
    """detail: the largest difference, or what went wrong."""

    name: str
    is_right: bool
    detail: str


def require_correct(ops: Ops, sizes: Sizes, device: torch.device, mesh: Mesh, mode: str) -> None:
    """Raises MissingCapability naming operator, difference and CANN unless every operation is right.

    mode: the profile's graph.mode.
    """
    findings = list(examine(ops, sizes, device, mesh, mode))
    wrong = next((finding for finding in findings if not finding.is_right), None)
    if wrong is not None:
        raise MissingCapability(
            f"rank {mesh.rank}: {wrong.name} is wrong here ({wrong.detail}), with {versions()}: install the CANN "
            "release that this torch-npu was made for, and see docs/ascend.md"
        )
    logger.info("self-test: %d operations agree with their CPU twins, with %s", len(findings), versions())


def examine_alone(profile: DeviceProfile) -> list[Finding]:
    """`lopa doctor --selftest`: this process's first device, at Dream-7B's shapes. Raises MissingCapability."""
    torch_npu, ops = require_devices(1), npu_ops()
    torch_npu.npu.set_device(0)
    sizes = Sizes.of_dream_7b(resolve_mesh(profile).tensor_parallel_size)
    return list(examine(ops, sizes, torch.device("npu", 0), Mesh(), profile.graph.mode))


def examine(ops: Ops, sizes: Sizes, device: torch.device, mesh: Mesh, mode: str) -> Iterator[Finding]:
    bench = Bench(ops, sizes, device)
    for name, check in CHECKS.items():
        yield _finding(name, partial(check, bench))
    if mode in GRAPH_CHECKS:
        name, check = GRAPH_CHECKS[mode]
        yield _finding(name, partial(check, bench))
    for axis, group, size in (("tp", mesh.tp_group, mesh.tp_size), ("bp", mesh.bp_group, mesh.bp_size)):
        if group is not None:
            yield _finding(f"all_reduce over {axis}", partial(all_reduce, group, size, sizes.width, device))


def versions() -> str:
    return f"CANN {cann_version()} and torch-npu {load_torch_npu().__version__}"


def _finding(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, check())
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        return Finding(name, False, " ".join(str(error).split())[:200])
