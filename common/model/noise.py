"""Random numbers of sampled tokens, and the other numbers that a row has for sampling.

The noise of a token is a hash of (request, step, position, token id). So it does not depend on how rows or vocabulary
are spread over processes. The host mixes request, step and position into two 32-bit keys a row. Every token id has two
32-bit numbers of its own. The device joins them by xor and one wrapping product of int32. These have the same bits on
CPU, CUDA and NPU, and need neither 64-bit arithmetic nor shifts.

Shapes: N positions, V the shard's vocabulary.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Float = npt.NDArray[np.float32]
_UInt64 = npt.NDArray[np.uint64]

NUM_SAMPLING_FIELDS = 6
# Keeps uniform numbers in [2^-24, 1 - 2^-24]: int32 reaches from -2^31 to 2^31 once it is float32.
UNIFORM_SCALE = 2.0**-32 * (1 - 2.0**-23)


class SamplingRows(NamedTuple):
    """How each position is drawn; [N] each. top_k: 0 is none. noise: 1, or 0 for the most probable token. key and
    factor: what its random numbers depend on."""

    temperature_N: Tensor  # float32, above 0
    top_p_N: Tensor  # float32
    top_k_N: Tensor  # float32
    noise_N: Tensor  # float32
    key_N: Tensor  # int32
    factor_N: Tensor  # int32, odd

    @classmethod
    def of(cls, fields_6N: Tensor) -> SamplingRows:
        """Make views of what `sampling_fields` made, on any device."""
        settings_4N = fields_6N[:4].view(torch.float32)
        return cls(*settings_4N.unbind(), *fields_6N[4:].unbind())


def sampling_fields(
    settings_3N: Float, request_N: Int, step_N: Int, position_N: Int | Int32, num_rows: int
) -> Int32:  # fmt: skip
    """[6, num_rows] int32 for `SamplingRows.of`, one block to upload; rows after the given N are padding.

    settings_3N: temperature (0: the most probable token), top_p and top_k (0: none). request_N: the request's 64-bit
        noise key.
    """
    fields_6N = np.empty((NUM_SAMPLING_FIELDS, num_rows), dtype=np.int32)
    num_given = len(request_N)
    settings_4N = fields_6N[:4].view(np.float32)
    settings_4N[:3, :num_given] = settings_3N
    is_drawn_N = settings_3N[0] > 0
    settings_4N[0, :num_given][~is_drawn_N] = 1.0
    settings_4N[3, :num_given] = is_drawn_N
    settings_4N[:, num_given:] = ((1.0,), (1.0,), (0.0,), (0.0,))
    keys = _mix(_mix(_mix(request_N.astype(np.uint64)) ^ step_N.astype(np.uint64)) ^ position_N.astype(np.uint64))
    fields_6N[4, :num_given], fields_6N[5, :num_given] = _halves(keys)
    fields_6N[4:, num_given:] = 0
    fields_6N[5] |= 1
    return fields_6N


def gumbel_noise(rows: SamplingRows, vocab_start: int, num_columns: int) -> Tensor:
    """[N, V] float32 of negated standard Gumbel noise, with 24 random bits: what is to be subtracted from logits."""
    bits_NV = noise_bits(rows, vocab_start, num_columns)
    return torch.rsub(bits_NV.float(), 0.5, alpha=UNIFORM_SCALE).log_().neg_().log_()


def noise_bits(rows: SamplingRows, vocab_start: int, num_columns: int) -> Tensor:
    """[N, V] int32, the upper bits of which are random."""
    key_V, factor_V = column_keys(vocab_start, num_columns, rows.key_N.device)
    return torch.bitwise_xor(rows.key_N[:, None], key_V).mul_(torch.bitwise_xor(rows.factor_N[:, None], factor_V))


@cache
def column_keys(vocab_start: int, num_columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two int32 [V] of the token ids from vocab_start on, the second ones even. Kept for good: graphs hold them."""
    ids_V = np.arange(vocab_start, vocab_start + num_columns, dtype=np.uint64)
    key_V, factor_V = _halves(_mix(_mix(ids_V)))
    with torch.inference_mode(mode=False):
        return torch.from_numpy(key_V).to(device), torch.from_numpy(factor_V & ~np.int32(1)).to(device)


def _halves(keys: _UInt64) -> tuple[Int32, Int32]:
    low, high = keys.view(np.int32).reshape(-1, 2).T.copy()
    return low, high


def _mix(x: _UInt64) -> _UInt64:
    """SplitMix64 (Steele, Lea, Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _UInt64 = x ^ (x >> np.uint64(31))
    return mixed
