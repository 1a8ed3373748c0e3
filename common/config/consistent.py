"""Which settings of `decode` contradict each other, one sentence each with the way out. Keys of one strategy are
checked by its class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common.policies import number_of, parsed, shipped

# Below it a temperature is 0. What is drawn is the same but for logits less than 0.02 apart, since noise spans 20; and
# logits over it keep far from float32's largest, and from the -1e30 of what cannot be drawn.
MIN_TEMPERATURE = 1e-3

# Rules of published code that fills one block at a time.
_ONE_BLOCK_RULES = ("static", "dynamic", "sequential", "entropy_bounded", "factor", "frechet")


def contradictions(decode: Any) -> Iterator[str]:
    """decode: a DecodeConfig, whose fields are checked one by one already."""
    yield from _of_strategy(decode, decode.strategy)
    yield from _of_fill_rule(decode, *parsed(decode.fill_rule))
    if parsed(decode.branch_score)[0] in ("exact", "subset"):
        yield from _of_drafts(decode, parsed(decode.branch_score)[0])
    if parsed(decode.branch_score)[0] == "ripple" and decode.sampling_strategy != "neg_entropy":
        yield f"branch_score ripple needs sampling_strategy neg_entropy, not {decode.sampling_strategy}"
    if number_of("spawn_rules", decode.spawn_rule, "tokens") > 1:
        yield from _of_tokens(decode)
    if "entropy" in parsed(decode.spawn_rule)[1] and decode.sampling_strategy != "neg_entropy":
        yield f"spawn_rule: its entropy needs sampling_strategy neg_entropy, not {decode.sampling_strategy}"
    if decode.mask_token_id is not None and decode.mask_token_id == decode.eos_token_id:
        yield f"mask_token_id and eos_token_id are both {decode.mask_token_id}: change one of them"
    if decode.temperature == 0 and (decode.top_p < 1 or decode.top_k is not None):
        yield (
            "top_p and top_k only act with temperature > 0: set temperature, to at least "
            f"{MIN_TEMPERATURE}, or remove them"
        )
    if decode.mask_probability == "counted" and decode.temperature > 0 and decode.strategy.name != "levenshtein":
        yield "mask_probability counted is for temperature 0: remove it"


def _of_strategy(decode: Any, strategy: Any) -> Iterator[str]:
    name, size = strategy.name, decode.block_size
    if name != "vanilla" and not strategy.is_from_zero and size > decode.max_new_tokens:
        yield (
            f"block_size {size} is larger than max_new_tokens {decode.max_new_tokens}: "
            "no block would fit; lower block_size or raise max_new_tokens"
        )
    if strategy.is_from_zero and decode.window_attention == "full":
        yield f"strategy {name} is of models with block-causal attention: set window_attention to block_causal"
    if name in ("fast_dllm", "vanilla", "multi_block") and decode.window_attention == "block_causal":
        yield f"strategy {name} attends to its whole canvas: set window_attention to full"
    if name == "fast_dllm_v2":
        yield from _of_sub_blocks(decode, strategy)
    if name == "levenshtein":
        yield from _of_revision(decode, strategy)
    if name == "block_diffusion" and decode.block_add_threshold < 1:
        if strategy.commit == "separate" or strategy.cache == "none":
            yield "block_add_threshold below 1 needs commit fused and cache prefix: change these, or set it to 1"
        if strategy.edit_threshold is not None:
            yield "edit_threshold: a block is edited before the next one opens; set block_add_threshold to 1"


def _of_revision(decode: Any, strategy: Any) -> Iterator[str]:
    if decode.temperature > 0:
        yield "strategy levenshtein takes the most probable tokens: set temperature to 0"
    if decode.block_add_threshold < 1:
        yield "block_add_threshold: levenshtein revises a block before the next one opens; set it to 1"
    if decode.fill_rule != "threshold":
        yield f"fill_rule {decode.fill_rule}: levenshtein fills by steps and skip_threshold; set it to threshold"
    if (decode.mask_probability == "counted") != strategy.counts_mask:
        yield (
            f"mask_probability {decode.mask_probability}: variant {strategy.variant} of levenshtein has its own: "
            "remove it"
        )
    defaults = type(strategy).model_fields
    unused = [key for key in ("steps", "max_block_steps") if getattr(strategy, key) != defaults[key].default]
    if strategy.variant == "sglang" and unused:
        yield f"{unused[0]}: variant sglang of levenshtein has none: remove it"
    if decode.mask_token_id is not None and decode.mask_token_id in (strategy.delete_token_id, strategy.split_token_id):
        yield f"mask_token_id {decode.mask_token_id} is one of levenshtein's edit tokens too: change one of them"


def _of_sub_blocks(decode: Any, strategy: Any) -> Iterator[str]:
    size, part = decode.block_size, strategy.sub_block_size
    if part is not None and size % part:
        yield f"sub_block_size {part} does not divide block_size {size}: set it to a divisor"
    if size == 1:
        yield "block_size 1: the token that fast_dllm_v2 begins a block with would leave nothing to fill; raise it"
    if decode.block_add_threshold < 1:
        yield "block_add_threshold: fast_dllm_v2 begins a block with the token of a finished one: remove it, or set 1"


def _of_fill_rule(decode: Any, rule: str, numbers: dict[str, float]) -> Iterator[str]:
    strategy = decode.strategy.name
    if strategy == "multi_block" and rule != "entropy":
        yield f"strategy multi_block fills by entropy, not by {rule}: set fill_rule to entropy"
    if rule in _ONE_BLOCK_RULES and strategy == "d2f":
        yield f"fill_rule {rule} is for strategies that fill one block at a time, not for d2f: set it to threshold"
    if rule in ("entropy", "entropy_bounded") and decode.sampling_strategy != "neg_entropy":
        yield f"fill_rule {rule} needs sampling_strategy neg_entropy, not {decode.sampling_strategy}"
    if numbers.get("steps", 0) > decode.block_size:
        yield (
            f"fill_rule {decode.fill_rule}: its steps are more than block_size {decode.block_size}, and a step fills "
            "one position at the least: lower them"
        )


def _of_drafts(decode: Any, score: str) -> Iterator[str]:
    """Yield why drafts cannot be checked: a step must depend on the tokens alone, or an accepted draft could differ
    from plain decoding."""
    strategy, (rule, numbers) = decode.strategy, parsed(decode.fill_rule)
    if strategy.name == "levenshtein":
        yield f"branch_score {score}: levenshtein moves tokens, so no draft of its blocks can be compared; use another"
    if rule == "agreed" or rule not in shipped("fill_rules"):
        yield f"branch_score {score}: fill_rule {rule} may look at other branches; set it to threshold"
    if score == "subset":
        return
    if decode.temperature > 0:
        yield "branch_score exact compares the most probable tokens: set temperature to 0"
    if decode.block_size % int(numbers.get("steps", 0) or 1):
        yield (
            f"branch_score exact: a block's steps fill unequal numbers of {decode.block_size} positions with "
            f"fill_rule {decode.fill_rule}; set its steps to a divisor"
        )
    if getattr(strategy, "min_block_steps", 1) > 1 or getattr(strategy, "max_block_steps", None) is not None:
        yield "branch_score exact needs blocks that end when they are full: remove min_block_steps and max_block_steps"
    if strategy.name == "fast_dllm_v2" and strategy.cache == "dual":
        yield "branch_score exact: every pass of fast_dllm_v2 with cache dual writes KV; set cache to prefix"


def _of_tokens(decode: Any) -> Iterator[str]:
    """Yield what cannot go with several tokens a mask: they are found in the plain logits."""
    start, strategy = f"spawn_rule {decode.spawn_rule} tries several tokens of a mask", decode.strategy
    if parsed(decode.spawn_rule)[0] == "nested":
        yield f"{start}, and nested drafts have one a mask: remove tokens"
    if strategy.name == "levenshtein":
        yield f"{start}, among which levenshtein has its edit tokens: set tokens to 1"
    if decode.temperature > 0:
        yield f"{start}, the most probable ones: set temperature to 0, or tokens to 1"
    if strategy.guidance or strategy.penalty or decode.mask_probability == "counted":
        yield f"{start} by logits as they are: remove cfg_scale, penalty_lambda, mask_probability, or set tokens to 1"
    if decode.sampling_strategy not in ("default", "margin", "neg_entropy"):
        yield f"{start}: set sampling_strategy to default, margin or neg_entropy, or tokens to 1"
