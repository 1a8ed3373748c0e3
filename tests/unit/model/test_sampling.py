"""Token statistics: against the plain formulas, whole or in vocabulary shards, greedy or sampled."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config import MIN_TEMPERATURE
from common.decoding import Sampling
from common.model import Gather, SamplingRows, merge_statistics, sampled_statistics, sampling_fields, shard_statistics
from common.policies import shipped
from tests.exchange import on_ranks

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
@pytest.mark.parametrize("strategy", shipped("token_confidences"))
def test_shards_merge_to_the_plain_formula(strategy: str, parts: int) -> None:
    x = logits()
    sampling = Sampling(strategy, MASK)
    merged = merge_statistics(torch.stack([shard_statistics(s, at, sampling) for at, s in shards(x, parts)]), strategy)
    x[:, MASK] = -torch.inf
    assert (merged[:, 0] == x.argmax(-1)).all()
    check_statistics(merged, x, strategy)


def check_statistics(found: Tensor, x: Tensor, strategy: str) -> None:
    """Probability and confidence of the tokens found, by the plain formulas; x: logits, -inf of what has none."""
    p = x.double().softmax(-1)
    chosen, best = p.gather(1, found[:, :1].long())[:, 0], p.topk(2).values
    wanted = {"default": chosen, "margin": best[:, 0] - best[:, 1], "neg_entropy": (p * (p + 1e-10).log()).sum(-1)}
    wanted["logit_margin"] = best[:, 0].log() - best[:, 1].clamp(min=1e-30).log()
    torch.testing.assert_close(found[:, 1].double(), chosen, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found[:, 2].double(), wanted[strategy], atol=2e-5, rtol=1e-4)


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


def rows_of(n: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, request: int = 1) -> SamplingRows:
    """n positions of one request and step."""
    settings_3N = np.array((temperature, top_p, top_k), dtype=np.float32)[:, None].repeat(n, axis=1)
    fields = sampling_fields(settings_3N, np.full(n, request), np.zeros(n, dtype=np.int64), np.arange(n), n)
    return SamplingRows.of(torch.from_numpy(fields))


def draw(
    x: Tensor, rows: SamplingRows, parts: int = 1, strategy: str = "default", mask: int = MASK, tempers: bool = False
) -> Tensor:
    """Each shard on a rank; all come to the same result. tempers: as published for some families."""
    pieces = shards(x, parts)
    is_cut = bool(((rows.top_p_N < 1) | (rows.top_k_N > 0)).any())
    sampling = Sampling(cast(Any, strategy), mask, is_sampled=True, is_cut=is_cut, tempers_confidence=tempers)

    def work(rank: int, gather: Gather) -> Tensor:
        at, piece = pieces[rank]
        return sampled_statistics(piece.clone(), at, sampling, rows, gather)

    results = on_ranks(parts, work)
    assert all(torch.equal(results[0], result) for result in results)
    return results[0]


CUTS = [(1.0, 0), (0.7, 0), (1.0, 5), (0.9, 3)]


TEMPERATURES = [0.0, 1e-3, 0.05, 0.3, 1.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("top_p, top_k", CUTS)
@pytest.mark.parametrize("strategy", shipped("token_confidences"))
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_probability_and_confidence_are_the_models_at_every_temperature(
    strategy: str, parts: int, top_p: float, top_k: int
) -> None:
    x = logits(n=60, v=700)
    whole = x.clone()
    whole[:, MASK] = -torch.inf
    for temperature in TEMPERATURES:
        rows = rows_of(60, temperature, *((top_p, top_k) if temperature else (1.0, 0)))
        drawn = draw(x, rows, parts, strategy)
        check_statistics(drawn, whole, strategy)
        assert torch.equal(drawn[:, 0], draw(x, rows, parts, strategy, tempers=True)[:, 0])
        assert (drawn[:, 0] != whole.argmax(-1)).any() or temperature < 1


@pytest.mark.parametrize("strategy", shipped("token_confidences"))
def test_at_the_least_temperature_the_result_is_the_greedy_one(strategy: str) -> None:
    x = logits(n=60, v=700)
    greedy = merge_statistics(shard_statistics(x.clone(), 0, Sampling(strategy, MASK))[None], strategy)
    for temperature in (0.0, MIN_TEMPERATURE):
        assert torch.equal(draw(x, rows_of(60, temperature), strategy=strategy), greedy)


@pytest.mark.parametrize("strategy", ["default", "margin", "neg_entropy"])
@pytest.mark.parametrize("temperature, top_k", [(0.3, 0), (2.0, 0), (2.0, 4)])
def test_as_published_they_are_those_of_what_is_drawn_from(strategy: str, temperature: float, top_k: int) -> None:
    x = logits(n=60, v=700)
    drawn = draw(x, rows_of(60, temperature, top_k=top_k), 2, strategy, tempers=True)
    x[:, MASK] = -torch.inf
    x /= temperature
    if top_k:
        x[x < x.topk(top_k).values[:, -1:]] = -torch.inf
    check_statistics(drawn, x, strategy)


@pytest.mark.parametrize("top_p, top_k", CUTS)
@pytest.mark.parametrize("parts", [2, 5])
def test_samples_do_not_depend_on_the_number_of_shards(top_p: float, top_k: int, parts: int) -> None:
    x = logits(n=300, v=1201).bfloat16()  # with ties
    rows = rows_of(300, 0.8, top_p, top_k)
    whole, sharded = (draw(x, rows, number, "neg_entropy") for number in (1, parts))
    assert torch.equal(whole[:, 0], sharded[:, 0])
    torch.testing.assert_close(whole, sharded, atol=1e-5, rtol=1e-4)


def test_a_row_is_drawn_the_same_whatever_its_neighbours_ask_for() -> None:
    x = logits(n=len(CUTS) * 50, v=700)
    mixed = [rows_of(len(x), 0.5 + 0.3 * place, *cut) for place, cut in enumerate(CUTS)]
    parts = [torch.arange(len(x)) % len(CUTS) == place for place in range(len(CUTS))]
    fields = [
        sum(field * part for field, part in zip(column, parts, strict=True)) for column in zip(*mixed, strict=True)
    ]
    together = draw(x, SamplingRows(*fields), strategy="margin")
    for rows, part in zip(mixed, parts, strict=True):
        alone = draw(x[part], SamplingRows(*(field[part] for field in rows)), strategy="margin")
        assert torch.equal(together[part], alone)


def test_sampling_follows_the_cut_distribution() -> None:
    x = torch.tensor([[2.0, 1.0, 0.0, -1.0, 3.0]]).repeat(4000, 1)
    drawn = draw(x, rows_of(4000, top_p=0.9), mask=4)
    p = torch.tensor([2.0, 1.0, 0.0, -1.0]).softmax(0)  # .64 .24 .09 .03: the nucleus of 0.9 holds the first three
    kept = torch.tensor([*p[:3], 0.0, 0.0]) / p[:3].sum()
    share = torch.bincount(drawn[:, 0].long(), minlength=5) / 4000
    assert (share - kept).abs().max() < 0.03
    torch.testing.assert_close(drawn[:, 1], p[drawn[:, 0].long()], atol=1e-5, rtol=1e-5)  # of all, not of the nucleus


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_frequencies_are_those_of_the_softmax(temperature: float) -> None:
    """Chi-square with 39 degrees of freedom, 20,000 draws."""
    x, n = logits(n=1, v=41, scale=1.5), 20_000
    drawn = draw(x.repeat(n, 1), rows_of(n, temperature))[:, 0].long()
    x[:, MASK] = -torch.inf
    expected = (x[0].double() / temperature).softmax(0) * n
    found = torch.bincount(drawn, minlength=41)
    assert found[MASK] == 0
    is_possible = expected > 0
    assert chi_square(found[is_possible], expected[is_possible]) < 72  # p = 0.001


def chi_square(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected) ** 2 / expected).sum())


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    x = torch.tensor([[0.6, 0.3, 0.1, 1e-9]]).log().repeat(500, 1)
    drawn = draw(x, rows_of(500, top_p=0.65), mask=3)
    assert set(drawn[:, 0].long().tolist()) == {0, 1}


def test_top_p_is_a_share_of_the_whole_vocabulary() -> None:
    """Ten tokens hold 0.6, some 4,000 others the rest: 0.5 takes nine of the ten, not one more."""
    x = torch.full((2000, 4010), 0.4 / 4000).log()
    x[:, 100:1100:100] = torch.tensor(0.06).log()
    drawn = draw(x, rows_of(2000, top_p=0.5), parts=2, mask=5000)
    assert set(drawn[:, 0].long().tolist()) == set(range(100, 1100, 100))  # they tie, so the tenth stays
    torch.testing.assert_close(drawn[:, 1], torch.full((2000,), 0.06), atol=1e-4, rtol=1e-3)


def test_no_more_than_the_candidates_are_drawn_from() -> None:
    x = torch.arange(600.0).mul(-1e-4).repeat(3000, 1)
    drawn = draw(x, rows_of(3000, top_p=0.99), parts=2, mask=700)[:, 0]
    assert 240 < drawn.max() < 256
    assert draw(x, rows_of(3000), parts=2, mask=700)[:, 0].max() > 560  # without a cut all of them take part


def test_top_k_of_one_is_greedy() -> None:
    x = logits(n=100)
    greedy = merge_statistics(shard_statistics(x.clone(), 0, Sampling("default", MASK))[None], "default")
    drawn = draw(x, rows_of(100, temperature=5.0, top_k=1))
    assert torch.equal(drawn, greedy)
