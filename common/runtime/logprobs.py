"""Log probabilities beside a pass's predictions: the head once more, of the states that are asked for alone.

The engine keeps the states that its head reads until the next pass, also those of a replayed one. So this is an eager
piece after the pass, which only passes with requests that ask pay for. Every branch rank takes the entries that it has
read; the vocabulary's shards are merged exactly; nobody gathers logits.

Shapes: F entries asked for, M of them on a rank (as many on all), V the shard's vocabulary, C alternatives, P shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.decoding import Int, Logprobs, Sampling
from common.runtime.collectives import Collectives
from common.runtime.waiting import DeviceEvent

Float = npt.NDArray[np.float32]
_NEVER = -1e30  # what is out of reach, as in common.model.sampling
LEAST = -9999.0  # stands for log 0, as in vLLM: JSON has no infinity


class Shares:
    """Which branch rank tells of which entries of a plan of `num_tokens`.

    entries_of: those that each rank has read, in its order. place_M, index_M: this rank's, as places among its reads
    and among the entries asked for, both padded to what the busiest rank has.
    """

    def __init__(self, num_tokens: int, entries_of: Sequence[Int], entry_F: Int, rank: int) -> None:
        owner_T, place_T = np.full(num_tokens, -1), np.zeros(num_tokens, np.int64)
        # An entry read on several ranks counts once, from the first.
        for number in reversed(range(len(entries_of))):
            owner_T[entries_of[number]] = number
            place_T[entries_of[number]] = np.arange(len(entries_of[number]))
        owner_F = owner_T[entry_F]
        assert (owner_F >= 0).all(), "only entries that were read can be asked for"
        size = int(np.bincount(owner_F).max())
        self.index_M, self.place_M = np.zeros(size, np.int64), np.zeros(size, np.int64)
        own = (owner_F == rank).nonzero()[0]
        self.index_M[: len(own)], self.place_M[: len(own)] = own, place_T[entry_F[own]]
        self._row_F = np.zeros(len(entry_F), np.int64)
        for number in range(len(entries_of)):
            own = (owner_F == number).nonzero()[0]
            self._row_F[own] = number * size + np.arange(len(own))
        self._is_in_order = bool(np.array_equal(self._row_F, np.arange(size * len(entries_of))))

    def in_order(self, told_PMX: Float) -> Float:
        """Return what all ranks tell, [F, X], in the order in which it was asked."""
        told_RX: Float = told_PMX.reshape(-1, told_PMX.shape[-1])
        return told_RX if self._is_in_order else told_RX[self._row_F]


def shard_logprobs(logits_MV: Tensor, token_M: Tensor, num_top: int, vocab_start: int, sampling: Sampling) -> Tensor:
    """Return [M, 3 + 2 C] float32 of a shard of the vocabulary: max, sum exp(l - max), the token's logit, and the
    best logits with their tokens. What the shard does not have is out of reach."""
    logits_MV, width = logits_MV.float(), logits_MV.shape[1]
    is_mask_V = torch.arange(width, device=logits_MV.device) == sampling.mask_token_id - vocab_start
    predicted_MV = logits_MV.masked_fill(is_mask_V, _NEVER)
    logits_MV = logits_MV if sampling.counts_mask else predicted_MV
    max_M1 = logits_MV.max(dim=-1, keepdim=True).values
    sum_M1 = (logits_MV - max_M1).exp().sum(dim=-1, keepdim=True)
    column_M = token_M - vocab_start
    is_here_M = (column_M >= 0) & (column_M < width)
    own_M1 = logits_MV.gather(1, column_M.clamp(0, width - 1)[:, None]).masked_fill(~is_here_M[:, None], _NEVER)
    best_MC, best_column_MC = predicted_MV.topk(min(num_top, width), dim=-1)
    missing = num_top - best_MC.shape[1]
    best_MC = torch.nn.functional.pad(best_MC, (0, missing), value=_NEVER)
    best_column_MC = torch.nn.functional.pad(best_column_MC, (0, missing))
    return torch.cat((max_M1, sum_M1, own_M1, best_MC, (best_column_MC + vocab_start).float()), dim=-1)


def merged_logprobs(shards_PMX: Tensor, num_top: int) -> Tensor:
    """Return [M, 1 + 2 C] float32: the token's log probability, the best ones', and their tokens."""
    max_M1 = shards_PMX[..., :1].max(dim=0).values
    sum_M1 = (shards_PMX[..., 1:2] * (shards_PMX[..., :1] - max_M1).exp()).sum(dim=0)
    total_M1 = max_M1 + sum_M1.log()
    own_M1 = shards_PMX[..., 2:3].max(dim=0).values - total_M1
    best_MX = shards_PMX[..., 3 : 3 + num_top].transpose(0, 1).flatten(1)
    token_MX = shards_PMX[..., 3 + num_top :].transpose(0, 1).flatten(1)
    best_MC, index_MC = best_MX.topk(num_top, dim=-1)
    found_MX = torch.cat((own_M1, best_MC - total_M1), dim=-1).clamp(min=LEAST)
    return torch.cat((found_MX, token_MX.gather(1, index_MC)), dim=-1)


def told_logprobs(
    shares: Shares, logits_MV: Tensor, token_F: Int, num_top: int, vocab_start: int, sampling: Sampling,
    collectives: Collectives, finished: Callable[[], DeviceEvent | None], wait: Callable[[DeviceEvent | None], None],
) -> Logprobs:  # fmt: skip
    """Merge what all ranks have and return it once the device has come this far. finished: an event after what has been
    queued; wait: for it."""
    token_M = torch.from_numpy(token_F[shares.index_M]).to(logits_MV.device)
    shard_MX = shard_logprobs(logits_MV, token_M, num_top, vocab_start, sampling)
    told_PMX = collectives.bp_stack(merged_logprobs(collectives.tp_stack(shard_MX), num_top))
    host = torch.empty(told_PMX.shape, dtype=torch.float32, pin_memory=told_PMX.device.type != "cpu")
    host.copy_(told_PMX, non_blocking=True)
    wait(finished())
    told_FX = shares.in_order(host.numpy())
    top_token_FC = told_FX[:, 1 + num_top :].astype(np.int64)
    return Logprobs(told_FX[:, 0], top_token_FC, told_FX[:, 1 : 1 + num_top])
