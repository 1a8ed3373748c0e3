"""The sizes of a training run: the checkpoint that ships and a toy for tests."""

from __future__ import annotations

from dataclasses import dataclass

from demo_problems import CANVAS_TOKENS, MAX_PROMPT_TOKENS

SEQUENCE = MAX_PROMPT_TOKENS + CANVAS_TOKENS  # tokens of a training row: prompt, answer, EOS up to the end


@dataclass(frozen=True)
class Recipe:
    """Widths and counts of the model, of the data and of the optimisation; `clip` is the gradient's largest norm."""

    hidden: int = 256
    layers: int = 10
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 672
    vocabulary: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    samples: int = 6_000_000
    chunk: int = 20_000
    tokenizer_samples: int = 60_000
    batch: int = 384
    warmup_steps: int = 200
    constant_share: float = 0.4
    muon_lr: float = 0.006
    muon_decay: float = 0.1
    adam_lr: float = 1e-3
    clip: float = 0.5
    checked_problems: int = 200
    checked_thresholds: tuple[float, ...] = (0.9,)
    plain: bool = False  # answers have no choice of words, half of the math problems have other sentences


TINY = Recipe(
    hidden=32, layers=2, heads=2, kv_heads=1, intermediate=48, vocabulary=400, samples=600, chunk=200,
    tokenizer_samples=300, batch=8, warmup_steps=4, checked_problems=4, checked_thresholds=(0.0,),
)  # fmt: skip
