"""Muon for the hidden matrices, AdamW for the rest, and the learning rate over the time of a run."""

from __future__ import annotations

import math

import torch
from torch import nn

from .recipe import Recipe


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration of Muon over a stack of matrices: their singular values go to about 1."""
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Muon with decoupled decay. Parameters of one shape are stacked: few launches instead of one set per matrix."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, decay: float, momentum: float = 0.95) -> None:
        shapes = sorted({tuple(p.shape) for p in parameters})
        groups = [{"params": [p for p in parameters if tuple(p.shape) == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "decay": decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters, momentum = group["params"], group["momentum"]
            gradient = torch.stack([p.grad for p in parameters])
            average = group.setdefault("average", torch.zeros_like(gradient))
            average.lerp_(gradient, 1 - momentum)
            update = orthogonalize(gradient.lerp(average, momentum)).to(gradient.dtype)
            scale = math.sqrt(max(1.0, gradient.shape[-2] / gradient.shape[-1]))
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(parameters, list(update.unbind()), alpha=-group["lr"] * scale)


def make_optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """The hidden matrices are those of `model.layers`, as in the checkpoint's tensor names."""
    hidden = [p for p in model.get_submodule("model.layers").parameters() if p.ndim == 2]
    is_hidden = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in is_hidden]
    is_cuda = rest[0].is_cuda
    adam = torch.optim.AdamW(rest, lr=recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=is_cuda)
    optimizers: list[torch.optim.Optimizer] = [Muon(hidden, recipe.muon_lr, recipe.muon_decay), adam]
    for group in (g for o in optimizers for g in o.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


def learning_rate_factor(elapsed: float, step: int, recipe: Recipe) -> float:
    """Warm-up by steps, then by the elapsed share of the time: constant, then linear to zero."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    return warm * min(1.0, max(0.0, (1 - elapsed) / (1 - recipe.constant_share)))
