"""Make data of seeds: the split by prompt, training samples as token arrays, held-out problems as records.

Whether a prompt is held out depends on its text alone, so no seed and no number of samples can leak one into training.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .code_problems import CodeProblem, evaluate, fixed_inputs, make_code
from .draft import MathProblem
from .math_families import make_math
from .new_templates import make_new_template

MATH_SHARE = 0.7
MAX_PROMPT_TOKENS = 96
CANVAS_TOKENS = 192
PROMPT_END = "\n"
Encode = Callable[[str], list[int]]
P = TypeVar("P", MathProblem, CodeProblem)
# The pattern of Dream's tokenizer (Qwen2), digits one by one, and the same rule for ASCII text in `re`.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ASCII_PATTERN = re.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def is_held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % 64 == 0


def make_plain_math(rng: random.Random) -> MathProblem:
    """Return a problem with a plain solution, half of them in the sentences of the new templates."""
    return (make_new_template if rng.random() < 0.5 else make_math)(rng, plain=True)


def make_plain_code(rng: random.Random) -> CodeProblem:
    return make_code(rng, plain=True)


def _makers(plain: bool) -> tuple[Callable[[random.Random], MathProblem], Callable[[random.Random], CodeProblem]]:
    return (make_plain_math, make_plain_code) if plain else (make_math, make_code)


def training_pairs(seed: int, plain: bool = False) -> Iterator[tuple[str, str]]:
    """An endless stream of (question, answer), none of them held out. plain: answers without a choice of words."""
    rng = random.Random(seed)
    math, code = _makers(plain)
    while True:
        if rng.random() < MATH_SHARE:
            question, answer, _ = math(rng)
        else:
            question, answer, *_ = code(rng)
        if not is_held_out(question):
            yield question, answer


class TokenizedSamples(NamedTuple):
    """Samples end to end: each is its prompt, then its answer without an EOS."""

    tokens: np.ndarray[Any, np.dtype[np.uint16]]
    prompt_lengths: np.ndarray[Any, np.dtype[np.uint8]]
    lengths: np.ndarray[Any, np.dtype[np.uint16]]


def word_encoder(encode_word: Encode) -> Encode:
    """The encoding of ASCII text by remembered words; byte-level BPE never merges across them."""
    known: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for word in ASCII_PATTERN.findall(text):
            if word not in known:
                known[word] = encode_word(word)
            ids += known[word]
        return ids

    return encode


def tokenize_samples(seed: int, count: int, encode: Encode, plain: bool = False) -> TokenizedSamples:
    """`count` samples whose prompt and answer fit the layout (an EOS must fit after the answer)."""
    tokens: list[int] = []
    prompt_lengths: list[int] = []
    lengths: list[int] = []
    for question, answer in training_pairs(seed, plain):
        prompt_ids, answer_ids = encode(question + PROMPT_END), encode(answer)
        if len(prompt_ids) > MAX_PROMPT_TOKENS or len(answer_ids) >= CANVAS_TOKENS:
            continue
        tokens += prompt_ids
        tokens += answer_ids
        prompt_lengths.append(len(prompt_ids))
        lengths.append(len(prompt_ids) + len(answer_ids))
        if len(lengths) == count:
            break
    return TokenizedSamples(
        np.array(tokens, np.uint16), np.array(prompt_lengths, np.uint8), np.array(lengths, np.uint16)
    )


def math_record(problem: MathProblem) -> dict[str, Any]:
    return {"kind": "math", "question": problem.question, "answer": problem.answer, "final": problem.final}


def code_record(problem: CodeProblem) -> dict[str, Any]:
    inputs = fixed_inputs(random.Random(problem.question), problem.takes_list)
    return {
        "kind": "code",
        "question": problem.question,
        "entry_point": problem.entry_point,
        "reference": problem.source,
        "inputs": [[value] for value in inputs],
        "expected": [evaluate(problem, value) for value in inputs],
    }


def _distinct(make: Callable[[random.Random], P], seed: str, wanted: Callable[[str], bool]) -> Iterator[P]:
    rng = random.Random(seed)
    seen: set[str] = set()
    while True:
        problem = make(rng)
        if wanted(problem.question) and problem.question not in seen:
            seen.add(problem.question)
            yield problem


def _numbered(prefix: str, records: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return [{"id": f"{prefix}-{i:04d}", **record} for i, record in enumerate(islice(records, count))]


def held_out_math(count: int, plain: bool = False) -> list[dict[str, Any]]:
    return _numbered("math", map(math_record, _distinct(_makers(plain)[0], "math", is_held_out)), count)


def held_out_code(count: int, plain: bool = False) -> list[dict[str, Any]]:
    return _numbered("code", map(code_record, _distinct(_makers(plain)[1], "code", is_held_out)), count)


def held_out_new_templates(count: int) -> list[dict[str, Any]]:
    return _numbered("new", map(math_record, _distinct(make_new_template, "new templates", lambda _: True)), count)
