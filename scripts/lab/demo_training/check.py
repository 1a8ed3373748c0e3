"""A short look at what was trained: held-out problems decoded in the plainest way. Results come from the evaluation."""

from __future__ import annotations

from itertools import compress

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from demo_problems import (
    CANVAS_TOKENS,
    MAX_PROMPT_TOKENS,
    PROMPT_END,
    held_out_code,
    held_out_math,
    held_out_new_templates,
)
from tokenizers import Tokenizer

from common.scoring import score, standard_error

from .log import Log
from .model import Dream
from .noise import block_ids
from .recipe import SEQUENCE, Recipe
from .tokenizer import special_ids


def filled(
    tokens_BS: torch.Tensor, logits_BSV: torch.Tensor, is_open_BS: torch.Tensor, mask_id: int, threshold: float
) -> torch.Tensor:
    """Return the tokens with every open place filled that is more probable than the threshold, else the best one."""
    logits_BSV[..., mask_id] = -float("inf")
    probability_BS, best_BS = logits_BSV.softmax(-1).max(-1)
    probability_BS = probability_BS.masked_fill(~is_open_BS, -1.0)
    is_best_BS = F.one_hot(probability_BS.argmax(1), tokens_BS.shape[1]).bool()
    return torch.where(is_open_BS & ((probability_BS > threshold) | is_best_BS), best_BS, tokens_BS)


def until_end(row: list[int], eos_id: int) -> list[int]:
    return row[: row.index(eos_id)] if eos_id in row else row


@torch.no_grad()
def decode_blockwise(
    model: Dream, prompts: list[list[int]], threshold: float, eos_id: int, mask_id: int, block_size: int = 32
) -> list[list[int]]:
    """Greedy, one block at a time, nothing cached: fill every mask above the threshold, else the best one."""
    device = model.lm_head.weight.device
    length_B1 = torch.tensor([[len(p)] for p in prompts], device=device)
    offset_BS = torch.arange(SEQUENCE, device=device) - length_B1
    block_BS = block_ids(offset_BS, torch.full_like(length_B1, block_size))
    tokens_BS = torch.tensor([p + [mask_id] * (SEQUENCE - len(p)) for p in prompts], device=device)
    for block in range(1, CANVAS_TOKENS // block_size + 1):
        horizon_BS = torch.full_like(block_BS, block)
        while (open_BS := (tokens_BS == mask_id) & (block_BS == block)).any():
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(tokens_BS, block_BS, horizon_BS).float().roll(1, dims=1)
            tokens_BS = filled(tokens_BS, logits, open_BS, mask_id, threshold)
    rows = zip(tokens_BS.tolist(), prompts, strict=True)
    return [until_end(row[len(p) : len(p) + CANVAS_TOKENS], eos_id) for row, p in rows]


def sanity_check(model: Dream, tokenizer: Tokenizer, recipe: Recipe, log: Log) -> None:
    count = recipe.checked_problems
    plain = recipe.plain
    problems = held_out_math(count, plain) + held_out_code(count // 2, plain) + held_out_new_templates(count)
    prompts = [tokenizer.encode(p["question"] + PROMPT_END).ids for p in problems]
    fits = [len(prompt) <= MAX_PROMPT_TOKENS for prompt in prompts]
    problems, prompts = list(compress(problems, fits)), list(compress(prompts, fits))
    for threshold in recipe.checked_thresholds:
        answers = decode_blockwise(model, prompts, threshold, *special_ids(tokenizer))
        texts = [tokenizer.decode(answer) for answer in answers]
        marks: dict[str, list[bool]] = {}
        for problem, text in zip(problems, texts, strict=True):
            marks.setdefault(problem["id"].split("-")[0], []).append(score(problem, text))
        shares = (f"{k} {sum(v)}/{len(v)} (se {standard_error(sum(v), len(v)):.3f})" for k, v in marks.items())
        log(f"sanity check, not a result: threshold {threshold}: " + ", ".join(shares))
    for i in (0, 1, -1):
        print(f"--- {problems[i]['question']}\n{texts[i]!r}", flush=True)
