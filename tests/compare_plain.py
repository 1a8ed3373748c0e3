"""Random decodes by the scheduler's loops and by the reference, one request after another in plain Python: every row,
winner, fill and lookahead of every step, and every completion. Confidences are coarse, so that ties are many.

`python tests/compare_plain.py 0 20000` compares so many seeds.
"""

from __future__ import annotations

import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import numpy as np
from pydantic import ValidationError
from reference_plain import PlainRequests
from reference_plain.rules import Rules as PlainRules

from common.config import DecodeConfig, renewed
from common.decoding import Completion, GenerationRequest, ModelFacts, Predictions, Sampling, StepPlan
from common.decoding.scheduling.requests import Requests
from common.decoding.scheduling.rules import Rules, no_stop_strings
from common.decoding.scheduling.state import DecodingRequest, Observer

MASK, EOS, SECOND_EOS, VOCAB = 5, 6, 7, 50


def predict(plan: StepPlan, seed: int) -> Predictions:
    """A function of seed, request, step and branch alone; NaN where the plan does not read."""
    values_3T = np.full((3, plan.num_tokens), np.nan, dtype=np.float32)
    branch = 0
    for row in range(plan.num_rows):
        branch = branch + 1 if row and plan.request_R[row] == plan.request_R[row - 1] else 0
        first, count = int(plan.first_R[row]), int(plan.num_entries_R[row])
        rng = np.random.default_rng((seed, int(plan.noise_key_R[row]), int(plan.step_R[row]), branch))
        token_T = np.where(rng.random(count) < 0.02, rng.choice((EOS, SECOND_EOS)), rng.integers(8, VOCAB, count))
        probability_T = rng.integers(0, 32, count) / 32
        values_3T[:, first : first + count] = token_T, probability_T, probability_T - 1
    values_3T[:, ~plan.is_read_T] = np.nan
    return Predictions(values_3T)


def rows_of(plan: StepPlan) -> dict[int, list[Any]]:
    """What each slot computes, whatever the order of requests."""
    found: dict[int, list[Any]] = {}
    for row in range(plan.num_rows):
        own = slice(int(plan.first_R[row]), int(plan.first_R[row] + plan.num_entries_R[row]))
        fields = plan.row_fields_8R[1:, row].tolist()
        entries = plan.entries_3T[:, own].tolist(), plan.is_read_T[own].tolist()
        drawn = None if plan.sampling_3R is None else plan.sampling_3R[:, row].tolist()
        changes = None if plan.changes_2T is None else (plan.changes_2T[:, own] - [[own.start], [0]]).tolist()
        found.setdefault(int(plan.slot_R[row]), []).append((fields, entries, drawn, changes))
    for span in plan.commits:
        found[span.slot].append(span[1:])
    return found


def plain_record(record: Any) -> dict[str, Any]:
    """A record as a dict; lookaheads without the rule that made them."""
    found = asdict(record) | {"lookahead": [made[:2] for made in record.lookahead]}
    return {name: list(value.items()) if isinstance(value, dict) else value for name, value in found.items()}


class Decoded:
    """Requests decoded step by step with `at_once` of them together; one is dropped in the middle. watched: ids of
    those that are looked at; None: nobody looks."""

    def __init__(self, decoder: Any, rules_of: Any, case: Case, watched: tuple[str, ...] | None) -> None:
        self.plans: list[dict[int, list[Any]]] = []
        self.winners: list[list[int]] = []
        self.records: list[Any] = []
        self.completions: list[list[Completion]] = []
        self.tokens: dict[str, tuple[int, ...]] = {}
        if watched is not None:
            decoder.observer = Observer(
                lambda record: self.records.append((len(self.plans), plain_record(record))), watched
            )
        free, waiting = list(range(case.at_once)), list(enumerate(case.requests))
        sampling = Sampling.of(case.requests[0][1], MASK)
        while decoder.active or waiting:
            while waiting and free:
                number, (request, decode) = waiting.pop(0)
                slot = free.pop(0)
                rules = rules_of(decode, EOS, no_stop_strings, case.facts, case.most_tokens)
                is_longer = len(request.prompt) > case.num_reused
                reused = case.num_reused if decode.strategy.name == "d2f" and is_longer else 0
                decoder.add(DecodingRequest(request, rules, slot, number, reused, 0.0))
            plan = decoder.plan_step(sampling)
            self.plans.append(rows_of(plan))
            self.winners.append([int(decoder.num_prompt_tokens())])
            winners = decoder.select_winners(predict(plan, case.seed))
            self.winners.append(winners.tolist())
            self.winners.append([round(float(score), 12) for score in decoder.scores()])
            ended = decoder.advance(winners, 0.0)
            if len(self.plans) == 4 and (dropped := decoder.drop("1", 0.0)) is not None:
                ended.append(dropped)
            for request_id, token_ids in decoder.newly_final():
                self.tokens[request_id] = (*self.tokens.get(request_id, ()), *token_ids)
            free = sorted((*free, *(decoding.slot for decoding, _ in ended)))
            self.completions.append(sorted((done for _, done in ended), key=lambda done: done.id))
            assert len(self.plans) < 5000
        self.records.sort(key=repr)


FILL_RULES = (
    "static", "dynamic", "sequential", "entropy", "entropy_bounded", "factor", "agreed", "agreed(share=0.5)", "frechet",
    "frechet(delta=0.02)", "threshold", "threshold", "threshold",
)  # fmt: skip


class Case:
    """A random set of requests, and the settings that they share a pass by."""

    def __init__(self, seed: int) -> None:
        rng = self._rng = random.Random(seed)
        self.seed = seed
        self.at_once = rng.randint(1, 5)
        self.facts = ModelFacts(rng.choice([0, 1]), rng.choice([(), (SECOND_EOS,)]))
        self.most_tokens = rng.choice([None, None, 4, 16])
        self.num_reused = rng.choice([0, 0, 2])
        self.attention = rng.choice(["full", "block_causal"])
        special = {"cfg_scale": 0.5} if self.attention == "full" else {"penalty_lambda": 0.5}
        self.special: dict[str, float] = rng.choice([{}] * 4 + [special])
        if "penalty_lambda" in self.special:
            self.facts = self.facts._replace(shift=0)
        shared = self.decode()
        self.requests = []
        for number in range(rng.randint(1, 7)):
            prompt = tuple(range(10, 10 + rng.choice([1, 3, 8, 9, 40])))
            decode = self.decode() if rng.random() < 0.4 else shared
            self.requests.append((GenerationRequest(str(number), prompt), decode))

    def decode(self) -> DecodeConfig:
        while True:
            try:
                return DecodeConfig(**renewed(self._settings()))
            except ValidationError:
                continue

    def _settings(self) -> dict[str, Any]:
        rng, size = self._rng, self._rng.choice([1, 2, 4, 8])
        names = ["d2f", "d2f", "multi_block", "fast_dllm", "fast_dllm", "vanilla"]
        if "cfg_scale" in self.special:
            names = ["fast_dllm"]
        if "penalty_lambda" in self.special:
            names = ["block_diffusion"]
        elif self.attention == "block_causal":
            names = ["d2f", "block_diffusion", "block_diffusion", "fast_dllm_v2"]
        strategy, score = rng.choice(names), rng.choice([
            "mean", "mean", "sliding_window", "random", "anchor", "lookahead", "num_sure", "num_sure(soon=0.25)",
            "expected(soon=0.5)", "expected(trust=2)", "hedged(risk=1)", "hedged(soon=0.5)",
        ])  # fmt: skip
        rule = "entropy" if strategy == "multi_block" else rng.choice(FILL_RULES)
        found: dict[str, Any] = {
            "strategy": strategy, "num_lookahead": rng.randint(0, 9), "block_size": size,
            "max_new_tokens": size * rng.randint(1, 6) + rng.choice([0, 0, size - 1]),
            "branch_score": score, "window_attention": self.attention, "fill_rule": rule,
            "decoded_token_threshold": rng.choice([0.01, 0.5, 0.95, 1]),
            "skip_threshold": rng.choice([0.1, 0.5, 0.9, 0.97, 1]),
            "bottom_share": rng.choice([1.0, 0.5, 0.1]) if score == "mean" else 1.0,
            "creation_weight": rng.choice([0, 0.5]),
            "spawn_rule": rng.choice(["confident", "confident", "uncertain", "random", "mixed", "near", "spread",
                                      "mixed(share=0.9)", "near(probability=0.2)", "near(entropy=0.5)",
                                      "confident(entropy=2)", "random(entropy=0)"]),
            "lookahead_rule": rng.choice(["all", "all", "stalled(plenty=2)", "stalled(plenty=1, share=0.3)"]),
            "spawn_blocks": rng.choice(["all", "first"]), "shift_row": rng.choice(["stale", "fresh"]),
            "cache": rng.choice(["prefix", "dual", "none"]), "stop_at_eos": rng.random() < 0.5,
            "max_steps": rng.choice([None, None, None, 5]), "entropy_threshold": rng.choice([0.2, 0.5]),
            "entropy_bound": rng.choice([0.3, 1.0]), "factor": rng.choice([0.5, 1.0, 2.0]),
            "eos_token_id": rng.choice([None, None, -1]), "sampling_strategy": "neg_entropy",
            **rng.choice([{}, {}, {"temperature": 0.5}, {"temperature": 1.5, "top_p": 0.5, "top_k": 7}]),
        }  # fmt: skip
        if strategy in ("d2f", "multi_block", "block_diffusion"):
            found["block_add_threshold"] = rng.choice([0, 0.1, 0.5, 1])
        if rule in ("static", "dynamic", "sequential"):
            found["denoising_steps"] = rng.choice([None, rng.randint(1, size)])
        if strategy == "multi_block":
            found["cache_delay"] = rng.randint(0, 4)
        if strategy == "block_diffusion":
            found["commit"] = rng.choice(["fused", "separate"])
            if not self.facts.shift and (rng.random() < 0.5 or "penalty_lambda" in self.special):
                found |= {"edit_threshold": rng.choice([0, 0.5, 0.9]), "max_post_edit_steps": rng.randint(0, 3)}
                found["block_add_threshold"] = 1
        if strategy == "fast_dllm_v2":
            found["sub_block_size"] = rng.choice([None, 2])
        if strategy == "fast_dllm":
            found |= rng.choice([{}, {"min_block_steps": 2}, {"max_block_steps": 2}, {"max_block_steps": 3}])
        if strategy in ("block_diffusion", "fast_dllm_v2"):
            found["end_at"] = rng.choice(["token", "block"])
        return found | self.special


def difference(seed: int) -> str | None:
    """Where loops and reference first differ; None: nowhere. Once with every request looked at, once with some, once
    with nobody looking."""
    case = Case(seed)
    ids = tuple(str(number) for number in range(len(case.requests)))
    wanted = Decoded(PlainRequests(MASK), PlainRules.of, case, ids)
    for watched in (ids, ids[::2], None):
        found = Decoded(Requests(case.at_once, MASK), Rules.of, case, watched)
        for name in ("plans", "winners", "completions", "tokens"):
            left, right = getattr(found, name), getattr(wanted, name)
            if left != right:
                pairs = enumerate(zip(left, right, strict=False))
                where = next((place for place, pair in pairs if pair[0] != pair[1]), "length")
                both = () if where == "length" else (left[where], right[where])
                return f"{name} at {where}, watched {watched}, {case.requests[0][1].strategy}: {both}"
        records = [record for record in wanted.records if watched and record[1]["request_id"] in watched]
        if found.records != records:
            return f"records, watched {watched}"
    assert sum(len(ended) for ended in wanted.completions) == len(case.requests)
    return None


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2])
    bad = [(seed, found) for seed in range(first, first + count) if (found := difference(seed)) is not None]
    print(f"{count} random decodes: {len(bad)} differ", *bad[:5], sep="\n")
    sys.exit(bool(bad))
