"""The rule of LLaDA2.2 as tests/golden_families/llada2_2/README.md says it, slowly and in lists: the specification that
the compiled loops are compared with. The checkpoint's own differs as said there; what it draws, the caller draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Model = Callable[
    [tuple[int, ...], int], list[list[np.float32]]
]  # of a block and its start: probabilities of each position
Draw = Callable[[int, int, int], int]  # of how many, in which pass, at which trial


@dataclass
class Rule:
    variant: str
    size: int
    threshold: np.float32
    edit_threshold: np.float32
    budget: int
    steps: int
    cap: int
    mask: int
    delete: int
    split: int


@dataclass
class Block:
    start: int
    behind: int  # the prompt's end, counted in the block
    tokens: list[int]
    marks: list[bool]
    steps: list[int]  # the pass that each token comes from, counted from 1
    first: int = 0  # masks at its start
    post: int = 0
    passes: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)
    history: dict[int, set[int]] = field(default_factory=dict)
    is_finalized: bool = False


def decode(model: Model, prompt: list[int], most: int, stops: list[int], rule: Rule, draw: Draw) -> dict[str, Any]:
    """Return every pass, and the answer."""
    size, passes = rule.size, []
    end, made, steps = len(prompt) // size * size, list(prompt), list[int]()
    if end and rule.variant != "checkpoint":
        passes.append({"kind": "prefill"})
    while end < len(prompt) + most:
        tokens = (made[end:] + [rule.mask] * size)[:size]
        behind = max(0, len(prompt) - end)
        marks = [place >= behind and token == rule.mask for place, token in enumerate(tokens)]
        block = Block(end, behind, tokens, marks, [0] * size)
        block.first = sum(block.marks)
        passes += decode_block(model, block, rule, draw, len(passes))
        made, end = made[:end] + block.tokens, end + size
        steps += block.steps[behind:]
        if any(token in stops for token in block.tokens[behind:]):
            break
    answer = made[len(prompt) :]
    at = next((place for place, token in enumerate(answer) if token in stops), None)
    answer = (answer if at is None else answer[: at + 1])[:most]
    has_stopped = bool(answer) and answer[-1] in stops
    return {"passes": passes, "answer": answer, "steps": steps[: len(answer)], "has_stopped": has_stopped}


def decode_block(model: Model, block: Block, rule: Rule, draw: Draw, before: int) -> list[dict[str, Any]]:
    passes: list[dict[str, Any]] = []
    one_pass = sglang_pass if rule.variant == "sglang" else other_pass
    while True:
        done = one_pass(model(tuple(block.tokens), block.start), block, rule, draw, before + len(passes))
        passes.append({"kind": "block", **done})
        if done["ends"]:
            return passes + [{"kind": "commit"}] * done["commits"]


def best_of(row: list[np.float32], without: set[int]) -> int:
    return max((token for token in range(len(row)) if token not in without), key=lambda token: (row[token], -token))


def open_places(block: Block, rule: Rule) -> tuple[list[int], list[int], list[int]]:
    """All masks, original ones, and filled places, after the prompt."""
    places = range(block.behind, rule.size)
    masks = [place for place in places if block.tokens[place] == rule.mask]
    return masks, [p for p in masks if block.marks[p]], [p for p in places if p not in masks]


def chosen(masks: list[int], confidence: dict[int, np.float32], quota: int | None, rule: Rule) -> list[int]:
    if quota is None:
        return masks
    sure = [place for place in masks if confidence[place] > rule.threshold]
    if len(sure) >= quota:
        return sure
    return sorted(masks, key=lambda place: (-confidence[place], place))[:quota]


def sglang_pass(rows: list[list[np.float32]], block: Block, rule: Rule, draw: Draw, number: int) -> dict[str, Any]:
    masks, original, filled = open_places(block, rule)
    before, budget = list(block.tokens), rule.budget
    block.passes += 1
    block.post += not original
    final = (budget > 0 and block.post >= budget) or (budget == 0 and not original) or block.passes > rule.size + budget
    candidate = {place: best_of(rows[place], set()) for place in masks + filled}
    fallback = [place for place in original if not final and candidate[place] == rule.mask]
    candidate |= {place: best_of(rows[place], {rule.mask}) for place in fallback}
    confidence = {place: rows[place][token] for place, token in candidate.items()}
    quota = 1 + len(masks) - len(original) if original and not final else None
    fills = chosen(masks, confidence, quota, rule)
    if budget == 0 and original and not final and set(original) <= set(fills):
        final, fills, quota = True, masks, None
    edits = [p for p in filled if candidate[p] != before[p] and confidence[p] > rule.edit_threshold]
    written = {place: candidate[place] for place in sorted(fills + edits)}
    said = said_of(block, rule, fallback, quota, final, candidate, confidence, fills, edits)
    if not written:
        return {**said, **ending(block, before, written, candidate, rule), "ends": True, "commits": 0}
    escape: list[int] = []
    if final:
        edit_ids = {rule.mask, rule.delete, rule.split}
        written |= {p: best_of(rows[p], edit_ids) for p, token in written.items() if token in edit_ids}
    elif tuple(before) in block.seen:
        changing = [place for place, token in written.items() if token != before[place]]
        if changing:
            place = min(changing, key=lambda p: (confidence[p], p))
            without = block.history.get(place, set()) | ({rule.mask} if place in original else set())
            written[place] = best_of(rows[place], without)
            escape = [block.start + place] if written[place] != candidate[place] else []
    block.seen.add(tuple(before))
    for place, token in written.items():
        block.history.setdefault(place, set()).add(token)
    write_and_scan(block, written, rule, number + 1)
    made = {**said, **ending(block, before, written, candidate, rule), "escape": escape}
    return {**made, "ends": final, "commits": int(final and block.tokens != before)}


def other_pass(rows: list[list[np.float32]], block: Block, rule: Rule, draw: Draw, number: int) -> dict[str, Any]:
    is_fluxserve = rule.variant == "fluxserve"
    masks, original, filled = open_places(block, rule)
    before, budget, step = list(block.tokens), rule.budget, block.passes
    block.post = 0 if original else block.post + 1
    candidate = {place: best_of(rows[place], set()) for place in masks + filled}
    confidence = {place: rows[place][token] for place, token in candidate.items()}
    quota = None
    if step < rule.steps and masks:
        quota = block.first // rule.steps + (step < block.first % rule.steps) + len(masks) - len(original)
    fills = chosen(masks, confidence, quota, rule)
    edits = [p for p in filled if candidate[p] != before[p] and confidence[p] > rule.edit_threshold]
    final = block.post >= budget if budget else bool(original) and set(original) <= set(fills)
    is_last = step >= rule.cap - 1
    final = final or is_last
    if final:
        fills, quota = masks, None
    written = {place: candidate[place] for place in sorted(fills + edits)}
    said = said_of(block, rule, [], quota, final, candidate, confidence, fills, edits)
    escape: list[int] = []
    if final:
        edit_ids = {rule.delete, rule.split} | ({rule.mask} if is_last else set())
        written |= {p: best_of(rows[p], edit_ids) for p, token in written.items() if token in edit_ids}
    else:
        escape = escape_repetition(rows, block, before, written, candidate, confidence, is_fluxserve, draw, number)
    block.seen.add(as_written(before, written))
    write_and_scan(block, written, rule, number + 1)
    block.passes += 1
    has_mask = any(block.tokens[p] == rule.mask for p in range(block.behind, rule.size))
    rests = not masks and block.tokens == before
    is_over = not is_fluxserve and not has_mask and (final or block.post + 1 > budget)
    made = {**said, **ending(block, before, written, candidate, rule), "escape": escape}
    return {
        **made,
        "ends": rests or is_over or (is_fluxserve and final),
        "commits": int(is_fluxserve and final and not rests),
    }


def as_written(before: list[int], written: dict[int, int]) -> tuple[int, ...]:
    return tuple(written.get(place, token) for place, token in enumerate(before))


def escape_repetition(
    rows: Any, block: Block, before: list[int], written: dict[int, int], candidate: dict[int, int],
    confidence: dict[int, np.float32], is_fluxserve: bool, draw: Draw, number: int,
) -> list[int]:  # fmt: skip
    for trial in range(5):
        if as_written(before, written) not in block.seen:
            break
        changing = [place for place, token in written.items() if token != before[place]]
        if not changing:
            break
        place = (
            min(changing, key=lambda p: (confidence[p], p))
            if is_fluxserve
            else changing[draw(len(changing), number, trial)]
        )
        best = candidate[place]
        written[place] = best_of(rows[place], {best}) if written[place] == best else best
    return [block.start + place for place, token in written.items() if token != candidate[place]]


def write_and_scan(block: Block, written: dict[int, int], rule: Rule, step: int) -> None:
    before = list(block.tokens)
    tokens, marks, steps = before[: block.behind], block.marks[: block.behind], block.steps[: block.behind]
    for place in range(block.behind, rule.size):
        token = written.get(place, before[place])
        if token == rule.delete:
            continue
        if token == rule.split:
            tokens.append(rule.mask)
            marks.append(False)
            steps.append(0)
            token = before[place]
        is_old = place not in written or written[place] == rule.split
        tokens.append(token)
        marks.append(block.marks[place])
        steps.append(block.steps[place] if is_old else step)
    missing = rule.size - len(tokens)
    block.tokens = (tokens + [rule.mask] * missing)[: rule.size]
    block.marks = (marks + [False] * missing)[: rule.size]
    block.steps = (steps + [0] * missing)[: rule.size]


def said_of(
    block: Block, rule: Rule, fallback: list[int], quota: int | None, final: bool, candidate: dict[int, int],
    confidence: dict[int, np.float32], fills: list[int], edits: list[int],
) -> dict[str, Any]:  # fmt: skip
    at = block.start
    return {
        "quota": quota, "final": final, "post": block.post, "fallback": [at + place for place in fallback],
        "candidates": {at + p: (token, float(confidence[p])) for p, token in candidate.items()},
        "fills": {at + place for place in fills}, "edits": {at + place for place in edits}, "escape": [],
    }  # fmt: skip


def ending(
    block: Block, before: list[int], written: dict[int, int], candidate: dict[int, int], rule: Rule
) -> dict[str, Any]:
    at = block.start
    return {
        "replaced": {at + p: token for p, token in written.items() if token != candidate[p]},
        "deleted": [at + p for p, token in written.items() if token == rule.delete],
        "split": [at + p for p, token in written.items() if token == rule.split],
        "after": list(block.tokens), "marks": [at + place for place, mark in enumerate(block.marks) if mark],
    }  # fmt: skip
