"""What a step minimises: cross-entropy on hidden tokens, and in distillation the entropy of what is right already.

Certainty forcing: dParallel, arXiv 2509.26488, section on certainty-forcing distillation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from .model import BlockDiffusion, View
from .noise import COPIES, NOISED, BlockBatch, training_view
from .recipe import BlockRecipe

Loss = Callable[[BlockDiffusion, BlockBatch, bool], torch.Tensor]


def block_loss(model: BlockDiffusion, batch: BlockBatch, view: View) -> torch.Tensor:
    length = batch.inputs_BT.shape[1] // COPIES
    hidden, _ = model.hidden(batch.inputs_BT, view)
    logits_NV = model.lm_head(hidden[:, : NOISED * length]).flatten(0, 1).float()
    target_N, weight_N = batch.targets_BN.flatten(), batch.weight_BN.flatten()
    loss = weighted_mean(F.cross_entropy(logits_NV, target_N, reduction="none"), weight_N)
    if model.recipe.certainty_weight:
        is_right_N = logits_NV.argmax(-1) == target_N
        entropy_N = entropy(logits_NV / model.recipe.certainty_temperature)
        loss = loss + model.recipe.certainty_weight * weighted_mean(entropy_N, weight_N * is_right_N)
    return loss


def weighted_mean(value_N: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
    return (value_N * weight_N).sum() / weight_N.sum().clamp(min=1e-6)


def entropy(logits_NV: torch.Tensor) -> torch.Tensor:
    """Return the entropy of the softmax, in nats, [N]."""
    log_probability_NV = logits_NV.log_softmax(-1)
    return -(log_probability_NV.exp() * log_probability_NV).sum(-1)


def make_loss(recipe: BlockRecipe, device: torch.device) -> Loss:
    """The loss of a batch, compiled on a GPU: once for each length of rows and kernel of attention."""
    compute = torch.compile(block_loss, dynamic=False) if device.type == "cuda" else block_loss
    views: dict[tuple[int, bool], View] = {}

    def loss(model: BlockDiffusion, batch: BlockBatch, is_flex: bool) -> torch.Tensor:
        key = (batch.inputs_BT.shape[1] // COPIES, is_flex)
        if key not in views:
            views[key] = training_view(key[0], recipe, device, is_flex)
        return compute(model, batch, views[key])

    return loss
