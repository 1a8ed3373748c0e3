"""Log probabilities out of shards of logits, and which rank tells of which entry."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.decoding import Sampling
from common.runtime.logprobs import LEAST, Shares, merged_logprobs, shard_logprobs

MASK = 17


def told(logits_MV: torch.Tensor, token_M: torch.Tensor, num_top: int, parts: int, sampling: Sampling) -> torch.Tensor:
    shards, start = [], 0
    for piece in logits_MV.tensor_split(parts, dim=1):
        shards.append(shard_logprobs(piece, token_M, num_top, start, sampling))
        start += piece.shape[1]
    return merged_logprobs(torch.stack(shards), num_top)


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("counts_mask", [False, True])
def test_shards_merge_to_a_softmax_over_all(num_top: int, parts: int, counts_mask: bool) -> None:
    """They do also where a shard has fewer tokens than alternatives are asked for."""
    logits_MV = torch.randn(6, 101, generator=torch.Generator().manual_seed(0)) * 4
    before_MV, token_M = logits_MV.clone(), torch.tensor([0, 16, 18, 50, 99, 100])
    found_MX = told(logits_MV, token_M, num_top, parts, Sampling("default", MASK, counts_mask=counts_mask))
    assert torch.equal(logits_MV, before_MV), "the caller's logits stay as they are"
    allowed_MV = before_MV.double()
    if not counts_mask:
        allowed_MV[:, MASK] = -torch.inf
    wanted_MV = allowed_MV.log_softmax(-1)
    torch.testing.assert_close(found_MX[:, 0].double(), wanted_MV.gather(1, token_M[:, None])[:, 0], atol=1e-5, rtol=0)
    wanted_MV[:, MASK] = -torch.inf  # it is never predicted
    best = wanted_MV.topk(num_top)
    torch.testing.assert_close(found_MX[:, 1 : 1 + num_top].double(), best.values, atol=1e-5, rtol=0)
    assert torch.equal(found_MX[:, 1 + num_top :].long(), best.indices)


def test_what_cannot_be_is_a_number_all_the_same() -> None:
    found_MX = told(torch.zeros(1, 30), torch.tensor([MASK]), 30, 1, Sampling("default", MASK))
    assert found_MX[0, 0] == LEAST and found_MX[0, 30] == LEAST and found_MX[0, 29] > LEAST


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_entry_is_told_by_the_first_rank_that_read_it(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    entries_of = [np.sort(rng.choice(40, 15, replace=False)) for _ in range(num_ranks)]
    read = np.unique(np.concatenate(entries_of))
    asked_F = rng.permutation(read)
    shares = [Shares(40, entries_of, asked_F, rank) for rank in range(num_ranks)]
    told_PMX = np.stack(
        [entries_of[rank][shares[rank].place_M][:, None].astype(np.float32) for rank in range(num_ranks)]
    )
    for rank, share in enumerate(shares):
        assert share.in_order(told_PMX)[:, 0].tolist() == asked_F.tolist()
        own = [entry for entry in asked_F.tolist() if entry in entries_of[rank]]
        first = [entry for entry in own if not any(entry in entries_of[before] for before in range(rank))]
        assert asked_F[share.index_M][: len(first)].tolist() == first


def test_a_rank_may_have_nothing_to_tell() -> None:
    share = Shares(9, [np.arange(4), np.zeros(0, np.int64)], np.array([2, 1]), 1)
    assert share.place_M.tolist() == [0, 0] and share.in_order(np.arange(4.0).reshape(2, 2, 1)).tolist() == [[0], [1]]
