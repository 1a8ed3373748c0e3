"""The noise of sampled tokens: its bits, its distribution, and what it depends on. Seeds are fixed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from common.model import SamplingRows, sampling_fields
from common.model.noise import column_keys, gumbel_noise

N, V = 1000, 1000


def rows_of(request: int = 1, step: int = 0, start: int = 0, n: int = N) -> SamplingRows:
    settings_3N = np.ones((3, n), dtype=np.float32)
    given = np.full(n, request), np.full(n, step), start + np.arange(n)
    return SamplingRows.of(torch.from_numpy(sampling_fields(settings_3N, *given, n)))


def uniform(rows: SamplingRows, vocab_start: int = 0) -> Tensor:
    """What Gumbel noise is made of, back from it: exp(-exp(-g))."""
    return (-gumbel_noise(rows, vocab_start, V).double().exp()).exp()


def excess(*uniforms: Tensor, num_bins: int) -> float:
    """How many standard deviations the chi-square statistic of the joint bins lies off its mean."""
    bins = torch.zeros_like(uniforms[0], dtype=torch.long)
    for values in uniforms:
        bins = bins * num_bins + (values * num_bins).long()
    num_all = num_bins ** len(uniforms)
    expected = bins.numel() / num_all
    statistic = float(((torch.bincount(bins.flatten(), minlength=num_all) - expected) ** 2 / expected).sum())
    return abs(statistic - (num_all - 1)) / (2 * (num_all - 1)) ** 0.5


def test_bits_are_those_of_a_wrapping_product() -> None:
    """int32 products wrap as unsigned ones do."""
    rows, (key_V, factor_V) = rows_of(), column_keys(5, V, torch.device("cpu"))
    unsigned = [x.numpy().view(np.uint32) for x in (rows.key_N, rows.factor_N, key_V, factor_V)]
    bits = (unsigned[0][:, None] ^ unsigned[2]) * (unsigned[1][:, None] ^ unsigned[3])
    wanted = 0.5 - bits.view(np.int32) * 2.0**-32
    np.testing.assert_allclose(uniform(rows, 5).numpy(), wanted, atol=2.0**-20, rtol=0)
    assert (unsigned[1] % 2 == 1).all() and (unsigned[3] % 2 == 0).all()


def test_noise_is_standard_gumbel() -> None:
    noise = -gumbel_noise(rows_of(), 0, V)
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - 1.6449) < 0.02


@pytest.mark.parametrize("seed", [1, 2**63 - 1])
def test_uniform_numbers_fill_all_bins_alike(seed: int) -> None:
    assert excess(uniform(rows_of(seed)), num_bins=1024) < 4


@pytest.mark.parametrize("distance", [1, 2, 64])
def test_rows_and_tokens_are_independent(distance: int) -> None:
    """Pairs of one token in two rows, of two tokens in one row, and the four of both."""
    u = uniform(rows_of())
    here, there = slice(None, -distance), slice(distance, None)
    assert excess(u[here], u[there], num_bins=32) < 4
    assert excess(u[:, here], u[:, there], num_bins=32) < 4
    assert excess(u[here, here], u[here, there], u[there, here], u[there, there], num_bins=6) < 4


@pytest.mark.parametrize("other", [{"request": 2}, {"step": 1}, {"start": N}, {"request": 1 + 2**40}])
def test_requests_steps_and_positions_are_independent(other: dict[str, int]) -> None:
    u, v = uniform(rows_of()), uniform(rows_of(**other))
    assert not torch.equal(u, v)
    assert excess(u, v, num_bins=32) < 4


def test_noise_depends_on_nothing_else() -> None:
    """Neither on the rows beside, nor on where the shard begins, nor on padding."""
    whole = gumbel_noise(rows_of(), 0, V)
    assert torch.equal(gumbel_noise(rows_of(start=300, n=10), 0, V), whole[300:310])
    assert torch.equal(gumbel_noise(rows_of(), 400, 100), whole[:, 400:500])
    settings, keys = np.ones((3, 7), dtype=np.float32), (np.full(7, 1), np.zeros(7, dtype=np.int64), np.arange(7))
    padded = SamplingRows.of(torch.from_numpy(sampling_fields(settings, *keys, 16)))
    assert torch.equal(gumbel_noise(padded, 0, V)[:7], whole[:7])
    assert (padded.temperature_N == 1).all() and (padded.top_k_N[7:] == 0).all()
