"""The generated problems are right, and no held-out prompt can reach training."""

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest
from demo_problems import (
    SPLIT_PATTERN,
    held_out_code,
    held_out_math,
    held_out_new_templates,
    is_held_out,
    tokenize_samples,
    training_pairs,
    word_encoder,
)
from demo_problems.code_problems import evaluate, fixed_inputs, make_code
from demo_problems.dataset import ASCII_PATTERN, make_plain_code, make_plain_math
from demo_problems.draft import LEADS, OPENINGS
from demo_problems.math_families import make_math
from demo_problems.new_templates import make_new_template
from tokenizers import Regex, pre_tokenizers

DEMO = Path(__file__).parents[3] / "models" / "demo"
EQUATION = re.compile(r"\d+(?: ?[-+*x/=] ?\d+)+")  # chains too: 2+3+4=5+4=9


@pytest.mark.parametrize("make", [make_math, make_new_template, make_plain_math])
def test_every_equation_holds_and_the_last_one_is_the_result(make) -> None:
    rng = random.Random(0)
    for _ in range(3000):
        problem = make(rng)
        equations = [equation.replace("x", "*").split("=") for equation in EQUATION.findall(problem.answer)]
        for first, *others in equations:
            assert others and all(eval(first) == eval(other) for other in others), problem
        assert int(equations[-1][-1]) == problem.final > 0
        assert problem.answer.endswith(f"#### {problem.final}")


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_code, make_plain_code])
def test_every_source_does_what_its_operations_say(make) -> None:
    rng = random.Random(0)
    for _ in range(2000):
        problem = make(rng)
        names: dict = {}
        exec(problem.source, names)
        for argument in fixed_inputs(rng, problem.takes_list):
            assert names[problem.entry_point](argument) == evaluate(problem, argument), problem


def test_training_contains_no_held_out_prompt() -> None:
    held_out = {p["question"] for p in [*held_out_math(50), *held_out_code(50)]}
    assert all(map(is_held_out, held_out))
    assert not any(is_held_out(question) for question, _ in islice(training_pairs(1), 20_000))


def test_new_templates_share_no_sentence_with_training() -> None:
    def sentences(question: str) -> set[str]:
        plain = re.sub(r"\d+", "N", question)
        return set(re.findall(r"[^.?]+[.?]", plain))

    trained = set().union(*(sentences(question) for question, _ in islice(training_pairs(2), 30_000)))
    assert not any(sentences(p["question"]) & trained for p in held_out_new_templates(200))


def test_a_plain_answer_has_no_choice_of_words() -> None:
    rng = random.Random(0)
    lines = [line for _ in range(2000) for line in make_plain_math(rng).answer.splitlines()[:-1]]
    assert not any(line in OPENINGS or line.startswith(("Step", *LEADS[3:-1])) for line in lines)
    assert len({re.sub(r"[A-Z]\w+|[\d+=]+|\b(?:he|she)\b", "_", line) for line in lines if " pays " in line}) == 1
    sources = [make_plain_code(rng).source for _ in range(500)]
    assert not any("#" in source or '"""' in source for source in sources)
    questions = {question for question, _ in islice(training_pairs(1, plain=True), 5000)}
    assert not any(map(is_held_out, questions))


def test_a_seed_fixes_the_samples() -> None:
    assert list(islice(training_pairs(3), 50)) == list(islice(training_pairs(3), 50))
    assert list(islice(training_pairs(3), 50)) != list(islice(training_pairs(4), 50))


def test_words_split_as_in_the_tokenizer() -> None:
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    for pair in islice(training_pairs(5), 500):
        for text in pair:
            assert ASCII_PATTERN.findall(text) == [word for word, _ in split.pre_tokenize_str(text)]


def test_samples_lie_end_to_end() -> None:
    encode = word_encoder(lambda word: [len(word)])
    samples = tokenize_samples(6, 20, encode)
    assert len(samples.tokens) == samples.lengths.sum()
    question, answer = next(training_pairs(6))
    first = samples.tokens[: samples.lengths[0]].tolist()
    assert first == [*encode(question + "\n"), *encode(answer)]
    assert samples.prompt_lengths[0] == len(encode(question + "\n"))


@pytest.mark.parametrize(
    ("name", "make", "count"),
    [
        ("heldout_math", held_out_math, 700),
        ("heldout_code", held_out_code, 300),
        ("heldout_new_templates", held_out_new_templates, 200),
    ],
)
def test_the_shipped_files_are_what_the_generator_writes(name: str, make, count: int) -> None:
    records = [json.loads(line) for line in (DEMO / f"{name}.jsonl").read_text().splitlines()]
    assert records == make(count)
    assert len({record["question"] for record in records}) == count
