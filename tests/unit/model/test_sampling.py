"""Token statistics: against the plain formulas, whole or in vocabulary shards, greedy or sampled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.decoding import Sampling
from common.model import NoiseKeys, merge_statistics, sampled_statistics, shard_statistics
from common.model.sampling import gumbel_noise

MASK = 17


def logits(n: int = 6, v: int = 101, scale: float = 4.0) -> Tensor:
    return torch.randn(n, v, generator=torch.Generator().manual_seed(0)) * scale


def shards(x: Tensor, parts: int) -> list[tuple[int, Tensor]]:
    pieces, start = [], 0
    for piece in x.clone().tensor_split(parts, dim=1):
        pieces.append((start, piece.contiguous()))
        start += piece.shape[1]
    return pieces


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("strategy", ["default", "margin", "neg_entropy"])
def test_shards_merge_to_the_plain_formula(strategy: str, parts: int) -> None:
    x = logits()
    sampling = Sampling(strategy, MASK)
    merged = merge_statistics(torch.stack([shard_statistics(s, at, sampling) for at, s in shards(x, parts)]), strategy)
    x[:, MASK] = -torch.inf
    p = x.double().softmax(-1)
    best = p.topk(2).values
    wanted = {"default": best[:, 0], "margin": best[:, 0] - best[:, 1], "neg_entropy": (p * (p + 1e-10).log()).sum(-1)}
    assert (merged[:, 0] == x.argmax(-1)).all()
    torch.testing.assert_close(merged[:, 1].double(), best[:, 0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(merged[:, 2].double(), wanted[strategy], atol=1e-5, rtol=1e-5)


def test_the_mask_id_is_never_predicted() -> None:
    x = logits()
    x[:, MASK] = 100.0
    merged = merge_statistics(shard_statistics(x, 0, Sampling("default", MASK))[None], "default")
    assert (merged[:, 0] != MASK).all()


def test_ties_go_to_the_lower_id() -> None:
    x = torch.zeros(2, 40)
    pieces = [shard_statistics(s, at, Sampling("margin", 3)) for at, s in shards(x, 4)]
    merged = merge_statistics(torch.stack(pieces), "margin")
    assert (merged[:, 0] == 0).all() and (merged[:, 2] == 0).all()


def draw(x: Tensor, sampling: Sampling, parts: int, request: int = 1) -> Tensor:
    """Runs the shards one after another with collectives played by two passes."""
    n = x.shape[0]
    keys = NoiseKeys(torch.full((n,), request), torch.zeros(n, dtype=torch.int64), torch.arange(n))
    pieces = shards(x, parts)
    if parts == 1:
        return sampled_statistics(pieces[0][1], 0, sampling, keys, lambda t: t, lambda t: t[None])
    return _in_threads(pieces, sampling, keys)


def _in_threads(pieces: list[tuple[int, Tensor]], sampling: Sampling, keys: NoiseKeys) -> Tensor:
    import threading

    barrier, slots, results = threading.Barrier(len(pieces)), [None] * len(pieces), [None] * len(pieces)

    def work(rank: int) -> None:
        def gather(t: Tensor) -> Tensor:
            slots[rank] = t
            barrier.wait()
            stacked = torch.stack(list(slots))
            barrier.wait()
            return stacked

        at, piece = pieces[rank]
        results[rank] = sampled_statistics(piece, at, sampling, keys, lambda t: gather(t).sum(0), gather)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(pieces))]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    assert all(torch.equal(results[0], result) for result in results)
    return results[0]


@pytest.mark.parametrize("top_p, top_k", [(1.0, None), (0.7, None), (1.0, 5), (0.9, 3)])
def test_samples_do_not_depend_on_the_number_of_shards(top_p: float, top_k: int | None) -> None:
    sampling = Sampling("neg_entropy", MASK, temperature=0.8, top_p=top_p, top_k=top_k)
    whole = draw(logits(), sampling, 1)
    halves = draw(logits(), sampling, 2)
    assert torch.equal(whole[:, 0], halves[:, 0])
    torch.testing.assert_close(whole, halves, atol=1e-5, rtol=1e-4)


def test_sampling_follows_the_cut_distribution() -> None:
    x = torch.tensor([[2.0, 1.0, 0.0, -1.0, 3.0]]).repeat(4000, 1)
    sampling = Sampling("default", 4, temperature=1.0, top_p=0.9)
    drawn = draw(x, sampling, 1)
    p = torch.tensor([2.0, 1.0, 0.0, -1.0]).softmax(0)  # .64 .24 .09 .03: the nucleus of 0.9 holds the first three
    kept = torch.tensor([*p[:3], 0.0, 0.0]) / p[:3].sum()
    share = torch.bincount(drawn[:, 0].long(), minlength=5) / 4000
    assert (share - kept).abs().max() < 0.03
    torch.testing.assert_close(drawn[:, 1], kept[drawn[:, 0].long()], atol=1e-5, rtol=1e-5)


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    x = torch.tensor([[0.6, 0.3, 0.1, 1e-9]]).log().repeat(500, 1)
    drawn = draw(x, Sampling("default", 3, temperature=1.0, top_p=0.65), 1)
    assert set(drawn[:, 0].long().tolist()) == {0, 1}


def test_noise_is_standard_gumbel_and_keyed() -> None:
    n = 400
    keys = NoiseKeys(torch.full((n,), 3), torch.zeros(n, dtype=torch.int64), torch.arange(n))
    noise = gumbel_noise(keys, torch.arange(500))
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - 1.6449) < 0.05
    for place in range(3):
        other = NoiseKeys(*(key + (place == i) for i, key in enumerate(keys)))
        correlation = torch.corrcoef(torch.stack((noise.flatten(), gumbel_noise(other, torch.arange(500)).flatten())))[
            0, 1
        ]
        # position + 1 is the next row's noise, so the same numbers one row on: no correlation in place
        assert abs(correlation) < 0.02
