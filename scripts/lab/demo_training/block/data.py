"""Batches without end of rows that are no longer than they have to be."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from demo_problems import MAX_PROMPT_TOKENS

from demo_training.data import Corpus, rows_of

from .noise import COPIES, BlockBatch, add_block_noise
from .recipe import BLOCK, BlockRecipe


def batch_size(length: int, recipe: BlockRecipe) -> int:
    """Rows of `length` tokens in a step: their copies together have about the recipe's positions."""
    return max(1, recipe.positions // (COPIES * length))


def samples_by_length(corpus: Corpus, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the samples that each length of rows takes: the text, its EOS, and a block of EOS after it where one fits.

    The last length takes all that remain. The samples of each length are its places in the corpus.
    """
    needed = (corpus.lengths // BLOCK + 2) * BLOCK
    limits = [0, *lengths[:-1], int(needed.max()) + lengths[-1]]
    return [((needed > low) & (needed <= high)).nonzero().flatten() for low, high in pairwise(limits)]


def block_batches(corpus: Corpus, recipe: BlockRecipe, eos_id: int, mask_id: int) -> Iterator[BlockBatch]:
    """Every sample is as likely as any other; a batch holds rows of one length."""
    samples = samples_by_length(corpus, recipe.lengths)
    sizes = [batch_size(length, recipe) for length in recipe.lengths]
    chances = torch.tensor([len(index) / size for index, size in zip(samples, sizes, strict=True)])
    while True:
        i = int(chances.multinomial(1))
        index_B = samples[i][torch.randint(len(samples[i]), (sizes[i],), device=samples[i].device)]
        rows = rows_of(corpus, index_B, recipe.lengths[i], eos_id)
        yield add_block_noise(*rows, mask_id, recipe.full_share)


def random_block_batch(length: int, recipe: BlockRecipe, device: torch.device) -> BlockBatch:
    """Return a batch of the usual size, for compiling and measuring."""
    tokens_BS = torch.randint(recipe.vocabulary - 2, (batch_size(length, recipe), length), device=device)
    prompt = torch.randint(20, MAX_PROMPT_TOKENS, (len(tokens_BS), 1), device=device)
    answer = torch.randint_like(prompt, 20, length - MAX_PROMPT_TOKENS)
    return add_block_noise(tokens_BS, prompt, answer, recipe.vocabulary - 1, recipe.full_share)
