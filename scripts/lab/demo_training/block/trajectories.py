"""What the distilled model learns from: the teacher's own greedy answers to prompts of the training distribution."""

from __future__ import annotations

import time

import numpy as np
from demo_problems import TokenizedSamples
from tokenizers import Tokenizer

from common.scoring import score
from demo_training.data import Corpus
from demo_training.log import Log
from demo_training.tokenizer import special_ids

from .decode import decode_blocks
from .model import BlockDiffusion


def split_samples(corpus: Corpus, first: int, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and reference answers of `count` samples."""
    prompts, references = [], []
    for i in range(first, first + count):
        start, middle, end = (int(corpus.starts[i]) + int(n) for n in (0, corpus.prompt_lengths[i], corpus.lengths[i]))
        prompts.append(corpus.tokens[start:middle].tolist())
        references.append(corpus.tokens[middle:end].tolist())
    return prompts, references


def kept_answers(tokenizer: Tokenizer, answers: list[list[int]], references: list[list[int]]) -> list[bool]:
    """Where the result after `####` is the reference's. Code has none and is not run here: it is kept unchecked."""
    texts = zip(tokenizer.decode_batch(answers), tokenizer.decode_batch(references), strict=True)
    return ["####" not in reference or score({"answer": reference}, answer) for answer, reference in texts]


def samples_of(prompts: list[list[int]], answers: list[list[int]]) -> TokenizedSamples:
    pairs = list(zip(prompts, answers, strict=True))
    tokens = [token for prompt, answer in pairs for token in (*prompt, *answer)]
    return TokenizedSamples(
        np.array(tokens, np.uint16),
        np.array([len(prompt) for prompt, _ in pairs], np.uint8),
        np.array([len(prompt) + len(answer) for prompt, answer in pairs], np.uint16),
    )


def trajectories(
    teacher: BlockDiffusion, tokenizer: Tokenizer, corpus: Corpus, seconds: float, log: Log
) -> list[TokenizedSamples]:
    """Decode batch after batch of the corpus' prompts until `seconds` are over or no prompt is left.

    An answer that does not end, or whose result is not the reference's, is left out. `corpus` lies on the CPU.
    """
    recipe, began, first = teacher.recipe, time.perf_counter(), 0
    chunks: list[TokenizedSamples] = []
    while first < len(corpus.starts) and (not chunks or time.perf_counter() - began < seconds):
        prompts, references = split_samples(corpus, first, min(recipe.trajectory_rows, len(corpus.starts) - first))
        first += len(prompts)
        decoded = decode_blocks(teacher, prompts, recipe.trajectory_threshold, *special_ids(tokenizer))
        is_right = kept_answers(tokenizer, decoded.answers, references)
        kept = [i for i, ended in enumerate(decoded.is_ended) if ended and is_right[i]]
        chunks.append(samples_of([prompts[i] for i in kept], [decoded.answers[i] for i in kept]))
    num_kept = sum(len(chunk.lengths) for chunk in chunks)
    log(f"the teacher answered {first} prompts; {num_kept} answers are kept")
    if not num_kept:
        raise SystemExit(f"None of the teacher's {first} answers is right: train the teacher longer.")
    return chunks
