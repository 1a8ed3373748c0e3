"""What weights must be before a model multiplies by them: small enough for this machine, and numbers.

One NaN makes every text the same garbage, and a run of it would end well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path

import torch

from common.errors import ConfigError, EngineError, first_line, is_out_of_memory

_NUM_ROWS = 8
_FIX = (
    "free what other processes hold, spread the model over more devices with tensor_parallel_size, or restore "
    "config.json if it was changed"
)


def look_finite(parameters: Collection[torch.Tensor]) -> bool:
    """Whether samples are finite: every value of norms and biases, some rows of matrices, a row of each tensor of
    stacked experts. False also where finite values are astronomic."""
    samples = [_sample(tensor) for tensor in parameters]
    # One sum for all, which is finite only if its terms are; one for each would cost a twentieth of the load.
    return isfinite(torch.cat([sample.flatten() for sample in samples]).sum(dtype=torch.float32).item())


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() < 2:
        return tensor
    if tensor.dim() == 2:
        return tensor[:: max(1, len(tensor) // _NUM_ROWS)]
    return tensor[:, :: max(1, tensor.shape[1] // 2)]  # gate and up lie in the two halves


def check_finite(tensor: torch.Tensor, dtype: torch.dtype, where: str) -> None:
    """Check every value, also once it is of the model's dtype. `where` names file and tensor. Raises ConfigError."""
    if not torch.isfinite(tensor).all():
        raise ConfigError(f"{where}: holds NaN or infinite values; download or train the checkpoint again")
    if not torch.isfinite(tensor.to(dtype)).all():
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{where}: holds values too large for {name}; set dtype to bfloat16 in the profile")


def check_memory(num_bytes: int, device: torch.device | str) -> None:
    """Raise EngineError where weights on the CPU are larger than its memory: some systems promise more than they
    have."""
    available = _memory()
    if torch.device(device).type == "cpu" and available is not None and num_bytes > available:
        raise EngineError(
            f"the weights need {num_bytes / 2**30:.1f} GiB and this machine has {available / 2**30:.1f} GiB: {_FIX}"
        )


@contextmanager
def allocated(name: str) -> Iterator[None]:
    """Raise EngineError where the memory of a parameter cannot be had."""
    try:
        yield
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # of torch, by how much too large it is
        if not is_out_of_memory(error):
            raise
        raise EngineError(f"{name}: no memory for this weight ({first_line(error)[:200]}): {_FIX}") from error


def _memory() -> int | None:
    """Return bytes, swap included; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return (kibibytes["MemTotal"] + kibibytes["SwapTotal"]) * 1024
