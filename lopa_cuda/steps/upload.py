"""Memory that the host writes and the device reads."""

from __future__ import annotations

import torch
from torch import Tensor


class Upload:
    """A host tensor (as numpy) and its copy on the device; the same memory on CPU."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self._host = host
        self.host = host.numpy()
        self.device = host if device.type == "cpu" else torch.zeros_like(host, device=device)

    def send(self) -> None:
        if self.device is not self._host:
            self.device.copy_(self._host, non_blocking=True)
