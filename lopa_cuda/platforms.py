"""What this engine runs on: NVIDIA GPUs, and any CPU."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import common.platforms
from common.errors import ConfigError
from common.platforms import Finding, GroupBackends, TuneOptions

if TYPE_CHECKING:
    from common.config import DeviceProfile, RunConfig


class Cpu(common.platforms.Platform):
    engine = "lopa_cuda"
    device = "cpu"


class Cuda(Cpu):
    device = "cuda"
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"

    def num_visible_devices(self) -> int:
        import torch

        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.accelerator.device_count() if accelerator is not None and accelerator.type == "cuda" else 0

    def memory_bytes(self) -> int | None:
        # By the driver's tool: asking torch would open the device in a process that only starts others.
        sizes = [line.partition(" MiB")[0] for line in _nvidia_smi("memory.total")]
        return min((int(size) * 2**20 for size in sizes if size.isdecimal()), default=None)

    def require_devices(self, profile: DeviceProfile, num_here: int) -> None:
        visible = self.num_visible_devices()
        if num_here > visible:
            raise ConfigError(
                f"profile {profile.name} wants {num_here} cuda devices on this node, {visible} are visible: "
                "use a profile with a smaller mesh, or check CUDA_VISIBLE_DEVICES"
            )

    def group_backends(self) -> GroupBackends:
        return GroupBackends("cpu:gloo,cuda:nccl")

    def versions(self) -> dict[str, str | None]:
        return {f"nvidia {number}": line for number, line in enumerate(_nvidia_smi())}

    def tune(self, profile: DeviceProfile, run: RunConfig, options: TuneOptions) -> Iterator[str]:
        from lopa_cuda.tuning import tune_model

        return tune_model(profile, run, options)

    def requirements(self, profile: DeviceProfile, num_processes: int, num_here: int) -> Iterator[Finding]:
        import torch
        import torch.distributed as dist

        detail = torch.version.cuda or "this torch is built without it"
        yield Finding("torch with CUDA", detail, bool(torch.version.cuda))
        if num_processes > 1:
            yield Finding("collectives", "nccl", dist.is_nccl_available())
        if profile.kernels == "triton":
            is_here = find_spec("triton") is not None
            yield Finding("triton", "installed" if is_here else "not installed: pip install -e '.[cuda]'", is_here)


def _nvidia_smi(fields: str = "index,name,memory.total,driver_version") -> list[str]:
    """One line with these for each GPU; or why there is none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ["no nvidia-smi"]
    query = [command, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi does not answer: {error}"]
    return result.stdout.strip().splitlines() or [f"nvidia-smi: {result.stderr.strip() or 'no device'}"]


PLATFORMS = (Cpu(), Cuda())
