"""The block-diffusion training: who sees whom, what is hidden, what counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from demo_problems import TokenizedSamples
from demo_training.block.data import batch_size, block_batches, samples_by_length
from demo_training.block.noise import END_WEIGHT, NOISED, BlockBatch, add_block_noise, is_visible
from demo_training.block.recipe import BLOCK, BlockRecipe, tiny
from demo_training.data import Corpus, corpus_of
from demo_training.recipe import SEQUENCE

LENGTH = 5 * BLOCK
PLACE = torch.arange(3 * LENGTH)
VISIBLE = is_visible(PLACE[:, None], PLACE, LENGTH)
EOS_ID, MASK_ID = 2, 1


def seen_by(copy: int, position: int) -> set[tuple[int, int]]:
    """(copy, block) of all that a place sees."""
    keys = VISIBLE[copy * LENGTH + position].nonzero().flatten().tolist()
    return {(key // LENGTH, key % LENGTH // BLOCK) for key in keys}


def test_a_noised_block_sees_itself_and_the_clean_blocks_before_it() -> None:
    for copy in range(NOISED):
        assert seen_by(copy, 0) == {(copy, 0)}
        assert seen_by(copy, 2 * BLOCK + 3) == {(copy, 2), (NOISED, 0), (NOISED, 1)}


def test_clean_blocks_see_clean_ones_up_to_themselves() -> None:
    assert seen_by(NOISED, 2 * BLOCK - 1) == {(NOISED, 0), (NOISED, 1)}
    assert seen_by(NOISED, 4 * BLOCK) == {(NOISED, block) for block in range(5)}


def noisy(full_share: float, rows: int = 256) -> tuple[BlockBatch, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    prompt, answer = torch.randint(20, 97, (rows, 1)), torch.randint(20, 190, (rows, 1))
    return add_block_noise(torch.zeros(rows, SEQUENCE).long(), prompt, answer, MASK_ID, full_share), prompt, answer


def test_the_copies_hide_every_answer_token_once_and_no_prompt_token() -> None:
    batch, prompt, _ = noisy(full_share=0.0)
    first, second, clean = batch.inputs_BT.view(-1, 3, SEQUENCE).unbind(1)
    assert torch.equal(first + second, (torch.arange(SEQUENCE) >= prompt).long()) and not clean.any()
    shares = first[:, 128:].reshape(-1, BLOCK).float().mean(1)  # after every prompt
    assert 0.45 < shares.mean() < 0.55 and shares.std() > 0.2


def test_full_blocks_are_hidden_to_the_last_token() -> None:
    batch, _, _ = noisy(full_share=1.0)
    assert batch.inputs_BT[:, 128:SEQUENCE].eq(MASK_ID).all()


def test_only_hidden_tokens_count_and_the_end_counts_little() -> None:
    batch, prompt, answer = noisy(full_share=0.0)
    weight = batch.weight_BN.view(-1, NOISED, SEQUENCE).sum(1)
    place, end = torch.arange(SEQUENCE), prompt + answer
    assert weight[(place >= prompt) & (place <= end)].eq(1).all()
    is_learnt = (place > end) & (place // BLOCK <= end // BLOCK + 2)
    assert weight[is_learnt].eq(END_WEIGHT).all()
    assert not weight[(place < prompt) | (place // BLOCK > end // BLOCK + 2)].any()
    assert not batch.weight_BN[batch.inputs_BT[:, : NOISED * SEQUENCE] != MASK_ID].any()


@pytest.fixture
def corpus() -> Corpus:
    lengths = np.array([60, 127, 128, 140, 200, 287], np.uint16)
    tokens = np.concatenate([np.full(n, 10 + i, np.uint16) for i, n in enumerate(lengths)])
    return corpus_of([TokenizedSamples(tokens, np.full(6, 30, np.uint8), lengths)], torch.device("cpu"))


def test_a_row_is_as_short_as_its_sample_with_an_end_allows(corpus: Corpus) -> None:
    short, long = samples_by_length(corpus, (160, SEQUENCE))
    assert corpus.lengths[short].tolist() == [60, 127, 128, 140] and corpus.lengths[long].tolist() == [200, 287]


def test_batches_hold_whole_samples_and_the_steps_positions(corpus: Corpus) -> None:
    recipe = tiny(BlockRecipe(positions=10_000))
    torch.manual_seed(0)
    seen = set()
    data = block_batches(corpus, recipe, EOS_ID, MASK_ID)
    for _ in range(40):
        batch = next(data)
        length = batch.inputs_BT.shape[1] // 3
        assert len(batch.inputs_BT) == batch_size(length, recipe)
        for row in batch.inputs_BT[:, NOISED * length :].tolist():
            text = row[: row.index(EOS_ID)]
            assert len(text) == corpus.lengths[text[0] - 10] and set(text) == {text[0]}
            seen.add(text[0])
    assert seen == set(range(10, 16))
