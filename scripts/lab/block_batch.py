"""Decode the demo's problems by BlockBatch (arXiv 2605.29233) in its plainest form; replay it by measured pass times.

PYTHONPATH=scripts/lab python -m scripts.lab.block_batch [PROBLEMS]    writes docs/results/block_batch.json

Branches with blocks of different sizes decode one problem, each block after block, in the same passes. After each pass
a branch takes tokens of those that are less far and agree with it, where it finds such a token likely itself; one that
falls back becomes a copy of the leader. A branch sees the text up to the end of its block. Nothing is cached, so what a
cache would have to compute again counts as nothing.

Shapes: B branches, S positions of prompt and canvas, V vocabulary.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from demo_problems import CANVAS_TOKENS, PROMPT_END, held_out_math
from demo_training.model import Dream
from demo_training.recipe import Recipe
from demo_training.tokenizer import special_ids
from safetensors.torch import load_file
from tokenizers import Tokenizer

from common.scoring import score, standard_error
from scripts.lab.result import RESULTS, ROOT, commit, write
from scripts.lab.study.replay import LOADS, Answer, read_pass_times, speed

SETTINGS = ((16,), (4, 8, 16), (8, 16, 32))
_FILL = 0.9  # from this probability on a mask is filled
_MERGE = 0.5  # a branch's own probability of another's token: as published code has it
_BEHIND = 8  # tokens: a branch that lacks more than these copies the leader
_COUNT = 100


class Branches:
    """One problem's branches. tokens_BS, own_BSV: probabilities of the last pass that computed a position."""

    def __init__(self, prompt: Sequence[int], sizes: Sequence[int], vocabulary: int, mask_id: int, eos_id: int) -> None:
        self.sizes, self.num_prompt, self.mask_id, self.eos_id = sizes, len(prompt), mask_id, eos_id
        row = torch.tensor([*prompt, *[mask_id] * CANVAS_TOKENS])
        self.tokens_BS = row.repeat(len(sizes), 1)
        self.own_BSV = torch.zeros(*self.tokens_BS.shape, vocabulary)

    def spans(self) -> list[tuple[int, int]]:
        """Return each branch's block: that of its first mask, cut at the canvas; nothing after the canvas where none
        is left."""
        found = []
        for size, row_S in zip(self.sizes, self.tokens_BS, strict=True):
            masks = (row_S == self.mask_id).nonzero()
            first = int(masks[0]) if len(masks) else len(row_S)
            start = first - (first - self.num_prompt) % size
            found.append((start, min(start + size, len(row_S))))
        return found

    def fill(self, spans: Sequence[tuple[int, int]]) -> None:
        """Fill each branch's block by its own probabilities: what is sure, else the surest."""
        for branch, (start, end) in enumerate(spans):
            probability, token = self.own_BSV[branch, start:end].max(-1)
            block = self.tokens_BS[branch, start:end]
            is_open = block == self.mask_id
            probability = probability.masked_fill(~is_open, -1.0)
            is_filled = is_open & (probability >= _FILL)
            is_filled[probability.argmax()] |= bool(is_open.any())
            block[is_filled] = token[is_filled]

    def merge(self) -> None:
        """Let each branch take tokens of those whose blocks end before its own; then the slow ones copy the leader."""
        ends = [end for _, end in self.spans()]
        order = sorted(range(len(ends)), key=lambda branch: -ends[branch])
        for place, own in enumerate(order):
            row_S = self.tokens_BS[own]
            best_S, taken_S = torch.full(row_S.shape, _MERGE), row_S.clone()
            for other in order[place + 1 :]:
                other_S = self.tokens_BS[other]
                is_both = (row_S != self.mask_id) & (other_S != self.mask_id)
                if (row_S[is_both] != other_S[is_both]).any():
                    continue
                likely_S = self.own_BSV[own].gather(1, other_S[:, None])[:, 0]
                is_taken = (row_S == self.mask_id) & (other_S != self.mask_id) & (likely_S > best_S)
                best_S, taken_S = best_S.where(~is_taken, likely_S), taken_S.where(~is_taken, other_S)
            self.tokens_BS[own] = taken_S
        num_filled_B = (self.tokens_BS != self.mask_id).sum(1)
        leader = int(num_filled_B.argmax())
        is_behind = num_filled_B < num_filled_B[leader] - _BEHIND
        self.tokens_BS[is_behind] = self.tokens_BS[leader].clone()
        self.own_BSV[is_behind] = self.own_BSV[leader].clone()

    def ended(self, spans: Sequence[tuple[int, int]]) -> list[int] | None:
        """Return the answer of a branch whose last block is full and has an end token, the surest of them; or of one
        that has filled its canvas."""
        found: list[tuple[float, list[int]]] = []
        for branch, (start, end) in enumerate(spans):
            answer = self.tokens_BS[branch, self.num_prompt :].tolist()
            if self.eos_id in answer and self.mask_id not in answer[: end - self.num_prompt]:
                at = answer.index(self.eos_id)
                found.append((float(self.own_BSV[branch, self.num_prompt + at, self.eos_id]), answer[: at + 1]))
            elif start >= len(self.tokens_BS[branch]):
                found.append((0.0, answer))
        return max(found)[1] if found else None


@torch.inference_mode()
def decode(
    model: Dream, prompt: Sequence[int], sizes: Sequence[int], eos_id: int, mask_id: int
) -> tuple[list[int], list[int]]:
    """Return the answer, and the tokens that each pass computed: the blocks of all branches, the prompt once."""
    branches = Branches(prompt, sizes, model.recipe.vocabulary, mask_id, eos_id)
    passes: list[int] = []
    while True:
        spans = branches.spans()
        passes.append(sum(end - start for start, end in spans) + len(prompt) * (not passes))
        longest = max(end for _, end in spans)
        position_S = torch.arange(longest)
        is_after_BS = torch.stack([position_S >= end for _, end in spans]).long()
        logits = model(branches.tokens_BS[:, :longest], is_after_BS, torch.zeros_like(is_after_BS)).roll(1, dims=1)
        logits[..., mask_id] = -torch.inf
        for branch, (start, end) in enumerate(spans):
            branches.own_BSV[branch, start:end] = logits[branch, start:end].softmax(-1)
        branches.fill(spans)
        answer = branches.ended(spans)
        if answer is not None:
            return answer, passes
        branches.merge()


def load(folder: Path) -> tuple[Dream, Tokenizer]:
    model = Dream(Recipe())
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def main(count: int = _COUNT) -> None:
    model, tokenizer = load(ROOT / "models" / "demo")
    costs = read_pass_times(RESULTS / "methods_demo.json")
    problems = held_out_math(count)
    rows = []
    for sizes in SETTINGS:
        answers = []
        for problem in problems:
            prompt = tokenizer.encode(problem["question"] + PROMPT_END).ids
            ids, passes = decode(model, prompt, sizes, *special_ids(tokenizer))
            answers.append(Answer(score(problem, tokenizer.decode(ids)), len(ids), passes))
        num_tokens = sum(answer.num_tokens for answer in answers)
        right = sum(answer.right for answer in answers)
        rows.append(
            [
                "BlockBatch, " * (len(sizes) > 1) + f"blocks of {', '.join(map(str, sizes))}",
                f"{100 * right / count:.1f} ± {100 * standard_error(right, count):.1f} %",
                num_tokens / sum(len(answer.passes) for answer in answers),
                num_tokens / sum(sum(answer.passes) for answer in answers),
                *(speed(answers, at_once, costs) for at_once in LOADS),
            ]
        )
        print(json.dumps(rows[-1]), flush=True)
    columns = [["setting", ""], ["right", ""], ["tokens a pass", ".2f"], ["a token computed", ".3f"]]
    result = {
        "conditions": f"models/demo in float32, the first {count} held-out math problems, block after block. A mask is "
        f"filled from a probability of {_FILL} on, another branch's token is taken above {_MERGE}, the leader is "
        f"copied by those that lack more than {_BEHIND} of its tokens. Pass times of docs/results/methods_demo.json",
        "command": "PYTHONPATH=scripts/lab python -m scripts.lab.block_batch",
        "commit": commit(),
        "columns": [*columns, *([f"tokens/s, {load} at once", ",.0f"] for load in LOADS)],
        "rows": rows,
    }
    write(RESULTS / "block_batch.json", result)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
