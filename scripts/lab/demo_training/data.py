"""Samples from worker processes, the corpus they become on the device, and noisy batches of it without end."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from demo_problems import TokenizedSamples, tokenize_samples, word_encoder
from tokenizers import Tokenizer

from .noise import Batch, add_noise
from .recipe import SEQUENCE, Recipe

_encode: Callable[[str], list[int]]


def _start_worker(tokenizer_json: str) -> None:
    global _encode
    tokenizer = Tokenizer.from_str(tokenizer_json)
    _encode = word_encoder(lambda word: tokenizer.encode(word, add_special_tokens=False).ids)


def _tokenize_chunk(job: tuple[int, int, bool]) -> TokenizedSamples:
    seed, count, plain = job
    return tokenize_samples(seed, count, _encode, plain)


@contextmanager
def generated_samples(
    recipe: Recipe, tokenizer: Tokenizer, first_seed: int, workers: int
) -> Iterator[Callable[[], list[TokenizedSamples]]]:
    """Worker processes generate the recipe's samples meanwhile; the yielded call waits for them.

    Workers are forked: enter this before the device is touched. Chunk i follows from `first_seed` + i alone.
    """
    jobs = [(first_seed + i, recipe.chunk, recipe.plain) for i in range(math.ceil(recipe.samples / recipe.chunk))]
    with multiprocessing.get_context("fork").Pool(workers, _start_worker, (tokenizer.to_str(),)) as pool:
        yield pool.map_async(_tokenize_chunk, jobs, chunksize=1).get


class Corpus(NamedTuple):
    tokens: torch.Tensor  # int16, samples end to end
    starts: torch.Tensor
    lengths: torch.Tensor
    prompt_lengths: torch.Tensor


def corpus_of(chunks: list[TokenizedSamples], device: torch.device) -> Corpus:
    lengths = np.concatenate([c.lengths for c in chunks]).astype(np.int64)
    prompts = np.concatenate([c.prompt_lengths for c in chunks]).astype(np.int64)
    tokens = np.concatenate([c.tokens for c in chunks]).astype(np.int16)
    parts = (tokens, np.cumsum(lengths) - lengths, lengths, prompts)
    return Corpus(*(torch.from_numpy(part).to(device) for part in parts))


class Rows(NamedTuple):
    """Samples with EOS up to the end of the row; lengths are [B, 1], the answer's without an EOS."""

    tokens_BS: torch.Tensor
    prompt_length: torch.Tensor
    answer_length: torch.Tensor


def rows_of(corpus: Corpus, index_B: torch.Tensor, length: int, eos_id: int) -> Rows:
    position_S = torch.arange(length, device=corpus.tokens.device)
    rows = index_B[:, None]
    index_BS = (corpus.starts[rows] + position_S).clamp(max=len(corpus.tokens) - 1)
    tokens_BS = corpus.tokens[index_BS].long().masked_fill(position_S >= corpus.lengths[rows], eos_id)
    prompt_length = corpus.prompt_lengths[rows]
    return Rows(tokens_BS, prompt_length, corpus.lengths[rows] - prompt_length)


def batches(corpus: Corpus, batch_size: int, eos_id: int, mask_id: int) -> Iterator[Batch]:
    while True:
        index_B = torch.randint(len(corpus.starts), (batch_size,), device=corpus.tokens.device)
        yield add_noise(*rows_of(corpus, index_B, SEQUENCE, eos_id), mask_id)
