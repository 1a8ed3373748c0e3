"""Blocks that are revised as LLaDA2.2's are: every pass is the slow plain rule's, alone or among others; what has been
told stays; lookaheads change nothing but the number of passes where the rule leaves them a choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from levenshtein_plain import Rule, decode

from common.config import DecodeConfig
from common.decoding import Completion, GenerationRequest, ModelFacts, Predictions, Scheduler, StepPlan, StepRecord
from common.decoding.scheduling.scheduler import noise_key

MASK, DELETE, SPLIT, EOS, VOCAB = 0, 1, 2, 3, 40
FACTS = ModelFacts(shift=0, edit_ids=(DELETE, SPLIT))


class Toy:
    """A model in which a position looks at its neighbours alone, so that blocks repeat; special tokens come often."""

    def __init__(self, seed: int, liking: tuple[float, float, float, float]) -> None:
        draw = np.random.default_rng(seed)
        self.logits = draw.normal(0, 1.5, (VOCAB, VOCAB, VOCAB)).astype(np.float32)
        self.own = draw.normal(0, 0.4, (8, VOCAB, VOCAB)).astype(np.float32)
        self.logits[..., [MASK, DELETE, SPLIT, EOS]] += np.array(liking, np.float32)

    def probabilities(self, block: tuple[int, ...], start: int, counts_mask: bool) -> np.ndarray[Any, Any]:
        left, right = (block[-1], *block[:-1]), (*block[1:], block[0])
        logits = self.logits[list(left), list(right)] + self.own[np.arange(start, start + len(block)) % 8, list(block)]
        if not counts_mask:
            logits[:, MASK] = -np.inf
        weight = np.exp(logits - logits.max(axis=1, keepdims=True))
        found: np.ndarray[Any, Any] = (weight / weight.sum(axis=1, keepdims=True)).astype(np.float32)
        return found


class ToyEngine:
    """Predicts each entry from the block that it stands in."""

    def __init__(self, toy: Toy, size: int) -> None:
        self.toy, self.size = toy, size
        self.num_best: list[int] = []

    def forward(self, plan: StepPlan) -> Predictions:
        sampling, tokens = plan.sampling, plan.token_T.tolist()
        count = sampling.num_best
        self.num_best.append(count)
        values = np.full((3 + 2 * count, plan.num_tokens), -1, np.float32)
        values[3 + count :] = 0
        for first in range(0, plan.num_tokens, self.size):
            block = tuple(tokens[first : first + self.size])
            rows = self.toy.probabilities(block, int(plan.position_T[first]), sampling.counts_mask)
            order = np.argsort(-rows, axis=1, kind="stable")[:, :count]
            end = 3 + order.shape[1]
            values[3:end, first : first + self.size] = order.T
            values[3 + count : end + count, first : first + self.size] = np.take_along_axis(rows, order, 1).T
            rows[:, MASK] = -1
            values[0, first : first + self.size] = rows.argmax(1)
            values[1:3, first : first + self.size] = rows.max(1)
        return Predictions(values)


def decoded(
    toy: Toy, config: DecodeConfig, prompts: list[list[int]], seen: list[StepRecord] | None = None
) -> tuple[dict[str, Completion], list[int], dict[str, list[int]]]:
    """Completions and what was told of each request before it ended, by id; how many best tokens were asked for."""
    engine = ToyEngine(toy, config.block_size)
    scheduler = Scheduler(
        config, mask_token_id=MASK, eos_token_id=EOS, num_slots=len(prompts), facts=FACTS,
        observer=None if seen is None else seen.append,
    )  # fmt: skip
    for number, prompt in enumerate(prompts):
        scheduler.admit(GenerationRequest(str(number), tuple(prompt)))
    completions: dict[str, Completion] = {}
    told: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    while scheduler.active:
        winners = scheduler.select_winners(engine.forward(scheduler.plan_step()))
        for result in scheduler.advance(winners):
            assert isinstance(result, Completion), result
            completions[result.id] = result
        for request_id, more in scheduler.newly_final():
            told[request_id] += more
    return completions, engine.num_best, told


@st.composite
def cases(draw: st.DrawFn) -> tuple[DecodeConfig, list[list[int]], Toy]:
    size = draw(st.sampled_from([2, 4, 8]))
    variant = draw(st.sampled_from(["checkpoint", "fluxserve", "sglang"]))
    strategy: dict[str, Any] = {
        "name": "levenshtein", "variant": variant, "edit_threshold": draw(st.sampled_from([0.0, 0.2, 0.6, 1.0])),
        "max_post_edit_steps": draw(st.sampled_from([0, 1, 3, 16])),
    }  # fmt: skip
    if variant != "sglang":
        strategy |= {
            "steps": draw(st.sampled_from([1, 3, 8, 32])),
            "max_block_steps": draw(st.sampled_from([2, 7, 60])),
        }
    config = DecodeConfig.model_validate(
        {
            "strategy": strategy,
            "block_size": size,
            "max_new_tokens": draw(st.integers(1, 3 * size)),
            "num_lookahead": 0,
            "skip_threshold": draw(st.sampled_from([0.2, 0.5, 0.9])),
        }
    )
    tokens = st.lists(st.sampled_from([DELETE, SPLIT, *range(EOS + 1, VOCAB)]), min_size=1, max_size=2 * size + 1)
    liking = tuple(draw(st.sampled_from([-9.0, 0.0, 1.0, 2.0])) for _ in range(4))
    return config, draw(st.lists(tokens, min_size=1, max_size=3)), Toy(draw(st.integers(0, 10**6)), liking)


def plain(toy: Toy, config: DecodeConfig, prompt: list[int], name: str = "0") -> dict[str, Any]:
    strategy: Any = config.strategy
    key = noise_key(0, name) % (2**31 - 1)

    def draw(count: int, number: int, trial: int) -> int:
        modulus = 2**31 - 1
        return int(((key * 1000003 + number) % modulus * 69069 + trial) % modulus % count)

    rule = Rule(
        strategy.variant, config.block_size, np.float32(config.skip_threshold), np.float32(strategy.edit_threshold),
        strategy.max_post_edit_steps, strategy.steps, strategy.max_block_steps, MASK, DELETE, SPLIT,
    )  # fmt: skip

    def model(block: tuple[int, ...], start: int) -> list[list[np.float32]]:
        return [list(row) for row in toy.probabilities(block, start, strategy.counts_mask)]

    return decode(model, prompt, config.max_new_tokens, [EOS], rule, draw)


def differences(expected: dict[str, Any], record: StepRecord) -> Iterator[str]:
    made = record.revision
    if expected["kind"] != "block":
        if made is not None:
            yield "a pass that writes KV alone revises nothing"
        return
    assert made is not None
    found = {
        "candidates": {at: (one.token, one.probability) for at, one in sorted(record.candidates.items())},
        "fills": set(record.filled), "edits": set(record.edited), "quota": made.quota, "final": made.is_final,
        "post": made.num_post, "fallback": list(made.runners_up), "replaced": made.replaced,
        "escape": list(made.escaped), "deleted": list(made.deleted), "split": list(made.inserted),
        "after": list(made.after), "marks": list(made.first),
    }  # fmt: skip
    for key, value in found.items():
        wanted = dict(sorted(expected[key].items())) if key == "candidates" else expected[key]
        if value != wanted:
            yield f"{key}: {value}, by the rule {wanted}"


def of_all_passes() -> tuple[DecodeConfig, list[list[int]], Toy]:
    """Two blocks that take every pass that their rule allows, after one that writes the prompt's KV."""
    strategy = {
        "name": "levenshtein", "variant": "fluxserve", "edit_threshold": 0.0, "steps": 3, "max_post_edit_steps": 0,
        "max_block_steps": 2,
    }  # fmt: skip
    settings = {"block_size": 4, "max_new_tokens": 3, "num_lookahead": 0, "skip_threshold": 0.2}
    return DecodeConfig.model_validate({"strategy": strategy, **settings}), [[1] * 6], Toy(0, (-9.0, -9.0, -9.0, -9.0))


def of_many_passes() -> tuple[DecodeConfig, list[list[int]], Toy]:
    """Three blocks, none of which comes to rest."""
    strategy = {
        "name": "levenshtein", "edit_threshold": 0.0, "steps": 1, "max_post_edit_steps": 0, "max_block_steps": 60,
    }  # fmt: skip
    settings = {"block_size": 2, "max_new_tokens": 4, "num_lookahead": 0, "skip_threshold": 0.2}
    toy = Toy(17, (2.0, -9.0, 2.0, -9.0))
    return DecodeConfig.model_validate({"strategy": strategy, **settings}), [[1]], toy


@pytest.mark.filterwarnings("ignore:divide by zero")
@given(cases())
@example(of_many_passes())
@example(of_all_passes())
@settings(max_examples=100, deadline=None)
def test_every_pass_is_the_plain_rules(case: tuple[DecodeConfig, list[list[int]], Toy]) -> None:
    config, prompts, toy = case
    records: list[StepRecord] = []
    completions, _, told = decoded(toy, config, prompts[:1], records)
    expected = plain(toy, config, prompts[0])
    for number, (step, record) in enumerate(zip(expected["passes"], records, strict=False)):
        assert list(differences(step, record)) == [], f"pass {number}"
    done = completions["0"]
    assert done.num_forwards == len(records) == len(expected["passes"])
    assert list(done.token_ids) == expected["answer"]
    assert list(done.step_map) == expected["steps"], "what is kept of a token moves with it"
    assert (done.finish_reason == "eos") is expected["has_stopped"]
    assert list(done.token_ids)[: len(told["0"])] == told["0"]


@given(cases())
@settings(max_examples=100, deadline=None)
def test_others_change_no_answer(case: tuple[DecodeConfig, list[list[int]], Toy]) -> None:
    config, prompts, toy = case
    completions, _, told = decoded(toy, config, prompts)
    for number, prompt in enumerate(prompts):
        expected, done = plain(toy, config, prompt, str(number)), completions[str(number)]
        assert (list(done.token_ids), done.num_forwards) == (expected["answer"], len(expected["passes"]))
        assert list(done.token_ids)[: len(told[str(number)])] == told[str(number)]
        assert not {MASK, DELETE, SPLIT} & set(done.token_ids)
