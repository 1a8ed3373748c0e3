"""Which settings of `decode` contradict each other: one sentence each, with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Below it a temperature is 0. What is drawn is the same but for logits less than 0.02 apart, since noise spans 20; and
# logits over it keep far from float32's largest, and from the -1e30 of what cannot be drawn.
MIN_TEMPERATURE = 1e-3
BLOCKS_FROM_ZERO = ("block_diffusion", "fast_dllm_v2")  # strategies whose blocks are counted from position 0

# Settings that only some strategies look at: name -> (the value that asks for nothing, strategies that have it).
_ONLY_OF: dict[str, tuple[Any, tuple[str, ...]]] = {
    "edit_threshold": (None, ("block_diffusion",)),
    "commit": ("fused", ("block_diffusion",)),
    "sub_block_size": (None, ("fast_dllm_v2",)),
    "min_block_steps": (1, ("fast_dllm",)),
    "max_block_steps": (None, ("fast_dllm",)),
    "cache_delay": (0, ("multi_block",)),
    "cfg_scale": (0, ("fast_dllm",)),
    "end_at": ("token", BLOCKS_FROM_ZERO),
}
_CACHES = {"dual": ("fast_dllm", "fast_dllm_v2"), "none": ("fast_dllm", "block_diffusion")}
_COUNTED_RULES = ("static", "dynamic", "sequential")
_ONE_BLOCK_RULES = (*_COUNTED_RULES, "entropy_bounded", "factor")  # of published code that fills one block at a time


def contradictions(decode: Any) -> Iterator[str]:
    """decode: a DecodeConfig, whose fields are checked one by one already."""
    yield from _of_blocks(decode)
    yield from _of_strategy(decode)
    yield from _of_fill_rule(decode)
    if decode.branch_score != "mean" and decode.bottom_share < 1:
        yield f"bottom_share only acts with branch_score mean, not {decode.branch_score}: remove it"
    if decode.mask_token_id is not None and decode.mask_token_id == decode.eos_token_id:
        yield f"mask_token_id and eos_token_id are both {decode.mask_token_id}: change one of them"
    if decode.temperature == 0 and (decode.top_p < 1 or decode.top_k is not None):
        yield (
            "top_p and top_k only act with temperature > 0: set temperature, to at least "
            f"{MIN_TEMPERATURE}, or remove them"
        )


def _of_blocks(decode: Any) -> Iterator[str]:
    size, is_from_zero = decode.block_size, decode.strategy in BLOCKS_FROM_ZERO
    if decode.strategy != "vanilla" and not is_from_zero and size > decode.max_new_tokens:
        yield (
            f"block_size {size} is larger than max_new_tokens {decode.max_new_tokens}: "
            "no block would fit; lower block_size or raise max_new_tokens"
        )
    if decode.sub_block_size is not None and size % decode.sub_block_size:
        yield f"sub_block_size {decode.sub_block_size} does not divide block_size {size}: set it to a divisor"


def _of_strategy(decode: Any) -> Iterator[str]:
    strategy = decode.strategy
    if strategy in BLOCKS_FROM_ZERO and decode.window_attention == "full":
        yield f"strategy {strategy} is of models with block-causal attention: set window_attention to block_causal"
    if strategy in ("fast_dllm", "vanilla", "multi_block") and decode.window_attention == "block_causal":
        yield f"strategy {strategy} attends to its whole canvas: set window_attention to full"
    if strategy != "d2f" and decode.reuse_prefix:
        yield f"reuse_prefix is of strategy d2f, {strategy} has none: remove it"
    if decode.cache in _CACHES and strategy not in _CACHES[decode.cache]:
        allowed = " and ".join(_CACHES[decode.cache])
        yield f"cache {decode.cache} is one of strategies {allowed}, not of {strategy}: change one of them"
    for name, (neutral, strategies) in _ONLY_OF.items():
        if getattr(decode, name) != neutral and strategy not in strategies:
            yield f"{name} only acts with strategy {' and '.join(strategies)}, not with {strategy}: remove it"
    if decode.cfg_scale and decode.cache != "none":
        yield f"cfg_scale needs cache none, since its masked prompts have keys of their own; it is {decode.cache}"
    if decode.max_block_steps is not None and decode.max_block_steps < decode.min_block_steps:
        yield f"max_block_steps {decode.max_block_steps} is below min_block_steps {decode.min_block_steps}: raise it"
    if strategy == "fast_dllm_v2" and decode.block_size == 1:
        yield "block_size 1: the token that fast_dllm_v2 begins a block with would leave nothing to fill; raise it"
    if strategy == "fast_dllm_v2" and decode.block_add_threshold < 1:
        yield "block_add_threshold: fast_dllm_v2 begins a block with the token of a finished one: remove it, or set 1"
    if decode.mask_probability == "counted" and decode.temperature > 0:
        yield "mask_probability counted is for temperature 0: remove it"
    waits = decode.commit == "separate" or decode.cache == "none"
    if strategy == "block_diffusion" and waits and decode.block_add_threshold < 1:
        yield "block_add_threshold below 1 needs commit fused and cache prefix: change these, or set it to 1"
    if decode.penalty_lambda and decode.edit_threshold is None:
        yield "penalty_lambda only acts with edit_threshold: set that, or remove penalty_lambda"
    if decode.edit_threshold is not None and decode.block_add_threshold < 1:
        yield "edit_threshold: a block is edited before the next one opens; set block_add_threshold to 1"


def _of_fill_rule(decode: Any) -> Iterator[str]:
    rule = decode.fill_rule
    if decode.strategy == "multi_block" and rule != "entropy":
        yield f"strategy multi_block fills by entropy, not by {rule}: set fill_rule to entropy"
    if rule in _ONE_BLOCK_RULES and decode.strategy == "d2f":
        yield f"fill_rule {rule} is for strategies that fill one block at a time, not for d2f: set it to threshold"
    if rule in ("entropy", "entropy_bounded") and decode.sampling_strategy != "neg_entropy":
        yield f"fill_rule {rule} needs sampling_strategy neg_entropy, not {decode.sampling_strategy}"
    if decode.denoising_steps is not None and rule not in _COUNTED_RULES:
        yield f"denoising_steps only acts with fill_rule {', '.join(_COUNTED_RULES)}, not with {rule}: remove it"
    if decode.denoising_steps is not None and decode.denoising_steps > decode.block_size:
        yield (
            f"denoising_steps {decode.denoising_steps} are more than block_size {decode.block_size}: a step fills at "
            "least one position; lower denoising_steps"
        )
