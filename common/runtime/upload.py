"""Memory that the host writes and the device reads."""

from __future__ import annotations

import torch


class Upload:
    """Host memory (as numpy), zero at first, and its copy on the device; the same memory on a CPU."""

    def __init__(
        self, shape: int | tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int32
    ) -> None:  # fmt: skip
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=device.type != "cpu")
        self.host = self._host.numpy()
        self.device = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)

    def send(self) -> None:
        if self.device is not self._host:
            self.device.copy_(self._host, non_blocking=True)
