"""Samples of the worker processes, and the batches they become."""

from __future__ import annotations

import dataclasses
from itertools import islice

import pytest
import torch
from demo_problems import PROMPT_END, TokenizedSamples, training_pairs
from demo_training.data import batches, corpus_of, generated_samples
from demo_training.noise import BEHIND_CANVAS
from demo_training.recipe import TINY
from demo_training.tokenizer import special_ids, train_tokenizer
from tokenizers import Tokenizer

RECIPE = dataclasses.replace(TINY, samples=50, chunk=20)
FIRST_SEED = 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(RECIPE, seed=3)


@pytest.fixture(scope="module")
def chunks(tokenizer: Tokenizer) -> list[TokenizedSamples]:
    with generated_samples(RECIPE, tokenizer, FIRST_SEED, workers=2) as wait_for_samples:
        return wait_for_samples()


def test_special_tokens_come_last(tokenizer: Tokenizer) -> None:
    assert special_ids(tokenizer) == (RECIPE.vocabulary - 2, RECIPE.vocabulary - 1)


def test_chunks_cover_the_samples_in_the_order_of_their_seeds(
    chunks: list[TokenizedSamples], tokenizer: Tokenizer
) -> None:
    assert [len(chunk.lengths) for chunk in chunks] == [20, 20, 20]
    for seed, chunk in enumerate(chunks, FIRST_SEED):
        prompts = [tokenizer.encode(question + PROMPT_END).ids for question, _ in islice(training_pairs(seed), 200)]
        assert chunk.tokens[: chunk.prompt_lengths[0]].tolist() in prompts


def test_a_row_is_a_sample_with_eos_up_to_the_end(chunks: list[TokenizedSamples], tokenizer: Tokenizer) -> None:
    corpus = corpus_of(chunks, torch.device("cpu"))
    eos_id, mask_id = special_ids(tokenizer)
    torch.manual_seed(0)
    batch = next(batches(corpus, 16, eos_id, mask_id))
    spans = zip(corpus.starts.tolist(), corpus.lengths.tolist(), strict=True)
    samples = [corpus.tokens[start : start + length].tolist() for start, length in spans]
    for row_S in batch.targets_BS.tolist():
        assert row_S[-1] == eos_id
        assert row_S[: row_S.index(eos_id)] in samples
        assert set(row_S[row_S.index(eos_id) :]) == {eos_id}
    is_hidden = batch.inputs_BS != batch.targets_BS
    assert batch.inputs_BS[is_hidden].eq(mask_id).all()
    assert not is_hidden[(batch.block_BS == 0) | (batch.block_BS == BEHIND_CANVAS)].any()
