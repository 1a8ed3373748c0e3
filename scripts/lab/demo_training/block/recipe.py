"""The sizes of block-diffusion training: the model that ships, its distillation, and toys of both for tests."""

from __future__ import annotations

from dataclasses import dataclass, replace

from demo_training.recipe import SEQUENCE, Recipe

BLOCK = 16  # positions of a block, counted from position 0 of the prompt


@dataclass(frozen=True)
class BlockRecipe(Recipe):
    """What block diffusion adds to the sizes of a run.

    `positions` of a step are shared by as many rows as fit, `lengths` are the rows' possible tokens before they are
    copied, `full_share` is the share of blocks with every answer token masked. `certainty_weight` scales the entropy,
    at `certainty_temperature`, of predictions that are right already; `trajectory_*` says how the teacher decodes.
    `experts`, if any, are MLPs of `expert_width` in the place of each layer's one, `active_experts` of them a token.
    """

    head_size: int = 64
    experts: int = 0
    active_experts: int = 2
    expert_width: int = 192
    samples: int = 2_500_000
    positions: int = 110_592
    lengths: tuple[int, ...] = (160, SEQUENCE)
    full_share: float = 0.15
    certainty_weight: float = 0.0
    certainty_temperature: float = 0.5
    trajectory_rows: int = 4096
    trajectory_share: float = 0.35
    trajectory_threshold: float = 0.95
    checked_problems: int = 100


DISTILLED = BlockRecipe(
    samples=300_000, chunk=10_000, full_share=0.5, certainty_weight=1.0, muon_lr=0.002, adam_lr=3e-4, warmup_steps=50,
    constant_share=0.3,
)  # fmt: skip


def tiny(recipe: BlockRecipe) -> BlockRecipe:
    """The same run at a size that a CPU finishes in seconds, with the shipped tokenizer."""
    return replace(
        recipe, hidden=32, layers=2, heads=2, kv_heads=1, head_size=16, intermediate=48, expert_width=32, samples=300,
        chunk=100, positions=3 * SEQUENCE, warmup_steps=4, trajectory_rows=16, checked_problems=4,
        checked_thresholds=(0.0,),
    )  # fmt: skip
