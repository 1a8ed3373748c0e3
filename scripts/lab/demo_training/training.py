"""Training by the clock: the loss, the choice of the attention kernel, the loop that ends with the time."""

from __future__ import annotations

import argparse
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from demo_problems import CANVAS_TOKENS, MAX_PROMPT_TOKENS
from torch import nn

from .log import Log
from .model import Dream
from .noise import Batch, add_noise
from .optimizers import learning_rate_factor, make_optimizers
from .recipe import SEQUENCE, Recipe

AnyModel = TypeVar("AnyModel", bound=nn.Module)
AnyBatch = TypeVar("AnyBatch", bound=tuple[Any, ...])  # its first tensor is the model's input


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return a parser of what every training takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, help="training samples to generate instead of the recipe's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--attention", choices=("auto", "sdpa", "flex"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="a toy size for tests")
    return parser


def masked_loss(model: Dream, batch: Batch, is_flex: bool) -> torch.Tensor:
    logits = model(batch.inputs_BS, batch.block_BS, batch.horizon_BS, is_flex)[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets_BS[:, 1:].flatten(), reduction="none")
    weight = batch.weight_BS[:, 1:].flatten()
    return (loss * weight).sum() / weight.sum()


def dream_loss(device: torch.device) -> Callable[[Dream, Batch, bool], torch.Tensor]:
    return torch.compile(masked_loss, dynamic=False) if device.type == "cuda" else masked_loss


def random_batch(recipe: Recipe, device: torch.device) -> Batch:
    """Return a batch of the usual size, for measuring."""
    tokens_BS = torch.randint(recipe.vocabulary - 2, (recipe.batch, SEQUENCE), device=device)
    prompt = torch.randint(20, MAX_PROMPT_TOKENS, (recipe.batch, 1), device=device)
    return add_noise(tokens_BS, prompt, torch.randint_like(prompt, 30, CANVAS_TOKENS), recipe.vocabulary - 1)


class Trial(NamedTuple):
    milliseconds: float
    loss: float
    norm: float


class Trainer(Generic[AnyModel, AnyBatch]):
    """`loss` takes the model, a batch and whether flex attention computes it; `trial` is a batch to time kernels by."""

    def __init__(
        self,
        recipe: Recipe,
        model: AnyModel,
        loss: Callable[[AnyModel, AnyBatch, bool], torch.Tensor],
        trial: AnyBatch,
        attention: str,
        log: Log,
    ) -> None:
        self.recipe, self.model, self.loss, self.log = recipe, model, loss, log
        self.parameters = list(model.parameters())
        self.device = self.parameters[0].device
        self.optimizers = make_optimizers(model, recipe)
        self.is_flex = self._choose_flex(trial) if attention == "auto" else attention == "flex"
        self.is_stopped = False

    def gradients(self, batch: AnyBatch, is_flex: bool) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.loss(self.model, batch, is_flex)
        loss.backward()
        return loss

    def _time(self, batch: AnyBatch, is_flex: bool) -> Trial:
        """One compiled forward and backward pass."""
        for _ in range(3):
            self.gradients(batch, is_flex)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            self.model.zero_grad()
            loss = self.gradients(batch, is_flex)
        torch.cuda.synchronize()
        milliseconds = (time.perf_counter() - began) * 100
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, math.inf)
        self.model.zero_grad()
        return Trial(milliseconds, loss.item(), norm.item())

    def _choose_flex(self, batch: AnyBatch) -> bool:
        """The faster of two kernels for the same rule, if both agree. Runs while the samples are being generated."""
        if self.device.type != "cuda":
            return False
        sdpa = self._time(batch, False)
        self.log(f"sdpa: {sdpa}")
        try:
            flex = self._time(batch, True)
        except Exception as error:  # an optional kernel: the choice is logged and the other one is complete
            self.log(f"flex attention does not work here, using sdpa: {error!r:.300}")
            self.model.zero_grad()
            return False
        self.log(f"flex: {flex}")
        agrees = abs(flex.loss - sdpa.loss) < 0.01 and abs(flex.norm - sdpa.norm) < 0.03 * sdpa.norm
        return agrees and flex.milliseconds < sdpa.milliseconds

    def compile_for(self, batch: AnyBatch) -> None:
        """Compile what a batch of this shape needs, so that no step of the run waits for it."""
        self.gradients(batch, self.is_flex)
        self.model.zero_grad()

    def step(self, batch: AnyBatch, factor: float) -> torch.Tensor:
        loss = self.gradients(batch, self.is_flex)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def _stop(self, *_: Any) -> None:
        self.is_stopped = True

    def run(self, data: Iterator[AnyBatch], seconds: float, save: Callable[[], None]) -> None:
        """Train for `seconds` or until SIGTERM, a step at least; save every four minutes and at the end."""
        previous = signal.signal(signal.SIGTERM, self._stop)
        try:
            self._run(data, seconds, save)
        finally:  # processes that are forked later would outlive their pool, which ends them by SIGTERM
            signal.signal(signal.SIGTERM, previous)

    def _run(self, data: Iterator[AnyBatch], seconds: float, save: Callable[[], None]) -> None:
        began = saved = reported = time.perf_counter()
        step = positions = 0
        elapsed = 0.0
        while step == 0 or (elapsed < 1 and not self.is_stopped):
            batch = next(data)
            loss = self.step(batch, learning_rate_factor(elapsed, step, self.recipe))
            step, positions = step + 1, positions + batch[0].numel()
            now = time.perf_counter()
            elapsed = (now - began) / seconds
            if now - reported > 10:
                rate = positions / (now - reported)
                self.log(f"step {step} loss {loss.item():.4f} {rate / 1e6:.2f} M positions/s {elapsed:.1%}")
                reported, positions = now, 0
            if now - saved > 240:
                save()
                saved = now
        save()
        self.log(f"trained {step} steps, last loss {loss.item():.4f}")
