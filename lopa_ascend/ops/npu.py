"""The `npu` lane: torch_npu itself, and one clear sentence for each way in which it can be missing.

Besides graphs.npu this is the only module that imports torch_npu, and only when asked to. A process that may meet a
torch_npu without CANN sets TORCH_DEVICE_BACKEND_AUTOLOAD=0 before it imports torch: torch's own auto-loading would fail
first, with a traceback.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from common.errors import MissingCapability, first_line
from common.version import release_of
from graphs.cann import told
from lopa_ascend.ops.facade import Ops
from lopa_ascend.ops.results import USUAL_ATTENTION, AttentionForm

CPU_BUILD = "--index-url https://download.pytorch.org/whl/cpu"
# The first release whose KV write says where a slot lies; earlier ones have no such operator for plain pages.
_OLDEST = (2, 9, 0, 2)
_NO_DRIVER = (
    "that library is the driver's: mount the host's /usr/local/Ascend/driver into the container, and add its "
    "lib64/driver and lib64/common to LD_LIBRARY_PATH, as scripts/env.sh does"
)
_MADE_FOR = "this torch-npu was made for: install one that docs/ascend.md names beside it, CANN and nnal alike"
_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_V1, _V2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"


def npu_ops(attention: AttentionForm = USUAL_ATTENTION) -> Ops:
    """Operations on npu tensors. Raises MissingCapability without torch_npu, CANN, a device or this form of
    attention."""
    torch_npu = require_devices(1)
    name = _V2 if attention.version == 2 else _V1
    if not hasattr(torch_npu, name):
        raise MissingCapability(
            f"torch-npu {version('torch-npu')} has no {name}: set attention to another version, or install a release "
            "that docs/ascend.md names"
        )
    # Off by default, and then a cast to FRACTAL_NZ quietly gives the plain format.
    torch_npu.npu.config.allow_internal_format = True
    return Ops(torch_npu, attention)


def load_torch_npu() -> Any:
    """Import torch_npu after checking that it is there, fits torch, and finds CANN."""
    try:
        installed = version("torch-npu")
    except PackageNotFoundError:
        raise MissingCapability(
            "torch-npu is not installed: run `pip install -e '.[ascend]'` as docs/ascend.md says, or pick a profile "
            "with device: cpu"
        ) from None
    if _number(installed) < _OLDEST:
        raise MissingCapability(
            f"torch-npu {installed} writes KV in another layout than its attention reads, before 2.9.0.post2: install "
            "torch-npu 2.10.0.post4 with CANN 9.1.0"
        )
    if release_of(installed) != release_of(torch.__version__):
        raise MissingCapability(
            f"torch {torch.__version__} and torch-npu {installed} are different releases: "
            f"pip install torch=={release_of(installed)} {CPU_BUILD}"
        )
    if torch.version.cuda is not None:
        # Both register the same allocator options; torch-npu then ends the process, there is nothing to catch.
        raise MissingCapability(
            f"torch {torch.__version__} is a CUDA build, which torch-npu cannot be loaded into: "
            f"pip install torch=={release_of(installed)} {CPU_BUILD}"
        )
    try:
        return import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        said = first_line(error)
        fixes = {"libascend_hal": _NO_DRIVER, "undefined symbol": f"that is of another release than {_MADE_FOR}"}
        fix = next((fix for sign, fix in fixes.items() if sign in said), "install CANN and source its set_env.sh")
        raise MissingCapability(f"torch-npu cannot load CANN ({said}): {fix}") from None


def num_visible_devices() -> int:
    """Ascend devices that this process can see; 0 as well where torch-npu or CANN is missing."""
    try:
        return _count(load_torch_npu())
    except MissingCapability:
        return 0


def require_devices(count: int) -> Any:
    """Return torch_npu. Raises MissingCapability unless at least `count` Ascend devices are visible to this process."""
    torch_npu = load_torch_npu()
    visible = _count(torch_npu)
    if visible == 0:
        raise MissingCapability(
            f"CANN is installed but no Ascend device is visible: check `npu-smi info`{_why_hidden(os.environ)}, and "
            "that /dev/davinci* are there and open to this user (group HwHiAiUser)"
        )
    if visible < count:
        raise MissingCapability(
            f"the profile needs {count} Ascend devices on this node and {visible} are visible: "
            "lower its mesh, or widen ASCEND_RT_VISIBLE_DEVICES"
        )
    return torch_npu


def open_device(count: int, index: int) -> None:
    """Take the device of this number, of `count` that the profile needs here. Raises MissingCapability with what CANN
    says."""
    torch_npu = require_devices(count)
    try:
        torch_npu.npu.set_device(index)
    except RuntimeError as error:
        raise MissingCapability(
            f"npu {index} cannot be opened ({told(error)}): see what `lopa doctor --profile` finds missing, and in "
            "`npu-smi info` whether the device is healthy and free"
        ) from error


def _why_hidden(environment: Mapping[str, str]) -> str:
    """Return what may be wrong with the variable that hides devices, for a sentence. CANN then shows none, and no
    reason."""
    given = environment.get(_VISIBLE)
    if given is None:
        return ""
    numbers = [int(number) if number.strip().isdecimal() else -1 for number in given.split(",")]
    if -1 in numbers or numbers != sorted(set(numbers)):
        return f", give {_VISIBLE}, which is {given!r}, ascending numbers with commas between"
    return f", {_VISIBLE}, which is {given!r}: a container counts its own devices from 0"


def keep_kv_writes_in_place() -> None:
    """Tell the npugraph_ex compiler that the KV write may run in place; it knows this of three other operators only.

    Without it every layer of a compiled step copies both caches whole, into a functional write and back.
    """
    load_torch_npu()
    try:
        passes = import_module("npugraph_ex._acl_concrete_graph.graph_pass")
        register = passes.register_inplaceable_npu_op
    except (ImportError, AttributeError):
        raise MissingCapability(
            f"torch-npu {version('torch-npu')} hides its in-place pass: set graph.mode to npugraph in the profile"
        ) from None
    register("npu_scatter_pa_kv_cache_functional", "npu_scatter_pa_kv_cache", mutated_arg=[2, 3])


def _count(torch_npu: Any) -> int:
    return int(torch_npu.npu.device_count()) if torch_npu.npu.is_available() else 0


def _number(full: str) -> tuple[int, ...]:
    """Turn 2.10.0.post4 into (2, 10, 0, 4); what has no post number counts as 0."""
    post = re.search(r"\.post(\d+)", full)
    parts = [int(part) if part.isdecimal() else 0 for part in release_of(full).split(".")]
    return (*parts, *[0] * (3 - len(parts)), int(post[1]) if post else 0)


def cann_version() -> str:
    try:
        return str(load_torch_npu().npu.utils.get_cann_version())
    except (AttributeError, RuntimeError):
        return "of unknown release"
