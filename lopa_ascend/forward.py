"""One forward pass over this rank's tokens: upload -> layers -> head where the scheduler reads -> statistics -> gather
over bp -> host.

`launch` only queues work; `wait` is the one place where the host waits for the device, for a few KB in pinned memory.
What the host can do in between is up to the engine.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.engine import EngineError
from common.models.dream import Dream
from common.plan import Sampling
from common.sampling import NoiseKeys, merge_statistics, sampled_statistics, shard_statistics
from lopa_ascend.kv_cache import PagedKVCache
from lopa_ascend.parallel import Collectives
from lopa_ascend.stages import AttendStep, RotaryTable
from lopa_ascend.step import DeviceStep


class Forward:
    """The model on its pages."""

    def __init__(
        self, model: Dream, rotary: RotaryTable, cache: PagedKVCache, collectives: Collectives, device: torch.device,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self.model = model
        self.device = device
        self._rotary = rotary
        self._cache = cache
        self._collectives = collectives
        self._timeout_s = timeout_s
        self._host = torch.zeros(0)
        self._done = torch.Event(device) if device.type != "cpu" else None

    def launch(self, step: DeviceStep, sampling: Sampling, noise_keys: NoiseKeys | None) -> None:
        cos_T1H, sin_T1H = self._rotary.at(step.position_T)
        attend = AttendStep(cos_T1H, sin_T1H, step.slot_T, step.rows, self._cache)
        hidden_TD = self.model(step.token_T, attend)
        predicted_M3 = self._predict(hidden_TD.index_select(0, step.read_M), sampling, noise_keys)
        self._send_back(self._collectives.bp_stack(predicted_M3))

    def wait(self) -> np.ndarray:
        """[bp, M, 3] float32 of the last launch: token, probability, confidence."""
        if self._done is not None:
            # Polls: a collective whose peer is gone would never end a wait.
            deadline = time.monotonic() + self._timeout_s
            while not self._done.query():
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"the device has not answered for {self._timeout_s:g} s: a peer is gone or stuck, or the step "
                        "is longer than collective_timeout_s"
                    )
        predicted: np.ndarray = self._host.numpy()
        return predicted

    def _predict(self, hidden_MD: Tensor, sampling: Sampling, noise_keys: NoiseKeys | None) -> Tensor:
        head, vocab_start = self.model.lm_head, self.model.vocab_start
        logits_MV = functional.linear(hidden_MD, head.weight)
        stack = self._collectives.tp_stack
        if noise_keys is None:
            statistics_M6 = shard_statistics(logits_MV, vocab_start, sampling)
            return merge_statistics(stack(statistics_M6), sampling.strategy)
        return sampled_statistics(logits_MV, vocab_start, sampling, noise_keys, self._collectives.tp_sum, stack)

    def _send_back(self, predicted_PM3: Tensor) -> None:
        if self._done is None:
            self._host = predicted_PM3
            return
        if self._host.shape != predicted_PM3.shape:
            self._host = torch.empty(predicted_PM3.shape, pin_memory=True)
        self._host.copy_(predicted_PM3, non_blocking=True)
        self._done.record()
