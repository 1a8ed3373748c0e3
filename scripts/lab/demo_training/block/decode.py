"""Greedy decoding of many prompts, block by block over kept keys and values. Plain PyTorch, of this package alone.

All rows go through the same block of positions at a time, so that no mask is needed: a block sees what is kept and
itself. Shape letters as in `model`, S positions of a row, L layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from demo_training.check import filled, until_end
from demo_training.recipe import SEQUENCE

from .model import BlockDiffusion, KeyValue, view_of
from .recipe import BLOCK


class Decoded(NamedTuple):
    """Answers in front of their EOS; whether each has one; passes over blocks with masks, commits not counted."""

    answers: list[list[int]]
    is_ended: list[bool]
    num_passes: list[int]


class Decoder:
    """The states of some rows; `tokens_BS` begins as prompts and masks."""

    def __init__(self, model: BlockDiffusion, prompts: list[list[int]], eos_id: int, mask_id: int) -> None:
        self.model, self.eos_id, self.mask_id = model, eos_id, mask_id
        device = model.lm_head.weight.device
        recipe, rows = model.recipe, len(prompts)
        self.tokens_BS = torch.tensor([p + [mask_id] * (SEQUENCE - len(p)) for p in prompts], device=device)
        self.is_answer_BS = self.tokens_BS == mask_id
        self.is_ended_B = torch.zeros(rows, dtype=torch.bool, device=device)
        self.num_passes_B = torch.zeros(rows, dtype=torch.long, device=device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shape = (recipe.layers, 2, rows, recipe.kv_heads, SEQUENCE, recipe.head_size)
        self.kept_L2BKSH = torch.empty(shape, dtype=dtype, device=device)

    def _pass(self, rows: torch.Tensor, start: int) -> tuple[torch.Tensor, list[KeyValue]]:
        """One block of some rows: what goes into the head, and the block's keys and values."""
        tokens, device = self.tokens_BS[rows, start : start + BLOCK], self.tokens_BS.device
        past: list[KeyValue] = [(k, v) for k, v in self.kept_L2BKSH[:, :, rows, :, :start]]
        view = view_of(torch.arange(start, start + BLOCK, device=device), self.model.recipe)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return self.model.hidden(tokens, view, past)

    def fill(self, rows: torch.Tensor, start: int, threshold: float) -> None:
        """Fill every mask above the threshold, and in each row at least the best one."""
        hidden, _ = self._pass(rows, start)
        tokens, logits = self.tokens_BS[rows, start : start + BLOCK], self.model.lm_head(hidden).float()
        is_open = tokens == self.mask_id
        self.tokens_BS[rows, start : start + BLOCK] = filled(tokens, logits, is_open, self.mask_id, threshold)
        self.num_passes_B[rows] += 1

    def commit(self, start: int) -> None:
        """Keep a finished block; rows whose answer ends in it take no further part."""
        rows = (~self.is_ended_B).nonzero().flatten()
        for kept_2BKSH, own in zip(self.kept_L2BKSH, self._pass(rows, start)[1], strict=True):
            for kept_BKSH, own_BKTH in zip(kept_2BKSH, own, strict=True):
                kept_BKSH[rows, :, start : start + BLOCK] = own_BKTH.to(kept_BKSH.dtype)
        block = slice(start, start + BLOCK)
        is_end_BT = (self.tokens_BS[:, block] == self.eos_id) & self.is_answer_BS[:, block]
        self.is_ended_B |= is_end_BT.any(dim=1)
        behind_BS = self.tokens_BS[:, start + BLOCK :]
        behind_BS[self.is_ended_B] = self.eos_id

    def decoded(self, prompts: list[list[int]]) -> Decoded:
        rows = zip(self.tokens_BS.tolist(), prompts, strict=True)
        answers = [until_end(row[len(p) :], self.eos_id) for row, p in rows]
        return Decoded(answers, self.is_ended_B.tolist(), self.num_passes_B.tolist())


@torch.no_grad()
def decode_blocks(
    model: BlockDiffusion, prompts: list[list[int]], threshold: float, eos_id: int, mask_id: int
) -> Decoded:
    """An answer ends with its EOS or the row; `threshold` is a probability."""
    decoder = Decoder(model, prompts, eos_id, mask_id)
    for start in range(0, SEQUENCE, BLOCK):
        while True:
            is_open_B = (decoder.tokens_BS[:, start : start + BLOCK] == mask_id).any(dim=1)
            rows = is_open_B.nonzero().flatten()
            if not len(rows):
                break
            decoder.fill(rows, start, threshold)
        if decoder.is_ended_B.all():
            break
        decoder.commit(start)
    return decoder.decoded(prompts)
