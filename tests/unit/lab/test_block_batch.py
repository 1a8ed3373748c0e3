"""BlockBatch's rule on hand-made cases: what branches fill, take from one another and copy, and which answer wins."""

from __future__ import annotations

import torch

from scripts.lab.block_batch import Branches

MASK, EOS, PROMPT, VOCABULARY = 0, 1, 3, 8


def branches(*rows: dict[int, int], sizes: tuple[int, ...] = (4, 8)) -> Branches:
    """rows: tokens by position of the canvas."""
    made = Branches([5] * PROMPT, sizes, VOCABULARY, MASK, EOS)
    for branch, row in enumerate(rows):
        for at, token in row.items():
            made.tokens_BS[branch, PROMPT + at] = token
    return made


def canvas(made: Branches, branch: int, end: int = 12) -> list[int]:
    return made.tokens_BS[branch, PROMPT : PROMPT + end].tolist()


def test_a_branch_fills_what_is_sure_in_its_block_else_the_surest() -> None:
    made = branches({}, {0: 7})
    spans = made.spans()
    assert spans == [(PROMPT, PROMPT + 4), (PROMPT, PROMPT + 8)]
    made.own_BSV[0, PROMPT + 1, 2], made.own_BSV[0, PROMPT + 2, 3] = 0.95, 0.9
    made.own_BSV[1, PROMPT, 4], made.own_BSV[1, PROMPT + 6, 6] = 0.99, 0.3
    made.fill(spans)
    assert canvas(made, 0, 4) == [0, 2, 3, 0]
    assert canvas(made, 1, 8) == [7, 0, 0, 0, 0, 0, 6, 0]


def test_a_branch_takes_what_it_finds_likely_itself_from_those_that_agree() -> None:
    made = branches({0: 7, 1: 2, 2: 3}, {0: 7})
    made.own_BSV[1, PROMPT + 1, 2], made.own_BSV[1, PROMPT + 2, 3] = 0.6, 0.4
    made.merge()
    assert canvas(made, 1, 4) == [7, 2, 0, 0], "0.4 is too little"
    other = branches({0: 6, 1: 2}, {0: 7})
    other.own_BSV[1, PROMPT + 1, 2] = 0.9
    other.merge()
    assert canvas(other, 1, 4) == [7, 0, 0, 0], "they differ in the first token"


def test_a_branch_far_behind_becomes_a_copy_of_the_leader() -> None:
    leader = dict.fromkeys(range(10), 7)
    made = branches({0: 6}, leader)
    made.merge()
    assert canvas(made, 0) == canvas(made, 1)
    near = branches({0: 6, 1: 6}, leader)
    near.merge()
    assert canvas(near, 0) != canvas(near, 1), "eight tokens are not more than eight"


def test_the_surest_end_of_a_full_block_wins() -> None:
    made = branches({0: 7, 1: EOS, 2: EOS, 3: EOS}, {0: 6, 1: 6, 2: EOS})
    spans = [(PROMPT, PROMPT + 4), (PROMPT, PROMPT + 8)]
    assert made.ended(spans) == [7, EOS]
    for at in range(3, 8):
        made.tokens_BS[1, PROMPT + at] = EOS
    made.own_BSV[0, PROMPT + 1, EOS], made.own_BSV[1, PROMPT + 2, EOS] = 0.8, 0.9
    assert made.ended(spans) == [6, 6, EOS]
    assert branches({0: 7, 1: EOS}).ended(spans) is None, "its block has masks"
    whole = branches(dict.fromkeys(range(len(made.tokens_BS[0]) - PROMPT), 7))
    assert whole.ended(whole.spans()) == [7] * (len(made.tokens_BS[0]) - PROMPT)
    assert not torch.equal(whole.tokens_BS[0], whole.tokens_BS[1])
