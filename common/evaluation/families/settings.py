"""Translate the settings of published decoding code to `decode`: the same tokens in the same passes.

Where that code decodes to the end of a block, so does `max_new_tokens` here; `commit: separate` and `end_at: block` are
its ways.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from common.config import DecodeConfig
from common.errors import ConfigError
from common.evaluation.families.trace import FamilyTrace

_DUAL_WITHOUT_CAP = "24cc59e7"  # the older dual cache, which looks for masks after a pass
_SDAR_RULES = {
    "low_confidence_static": "static", "low_confidence_dynamic": "dynamic", "sequential": "sequential",
    "entropy_bounded": "entropy_bounded",
}  # fmt: skip
_CACHES = {"generate": "none", "generate_with_prefix_cache": "prefix", "generate_with_dual_cache": "dual"}


def settings_of(trace: FamilyTrace) -> DecodeConfig:
    """Return `decode` for a trace. Raises ConfigError for settings of no known code."""
    given = trace.decode
    try:
        if "small_block_size" in given:
            own = _fast_dllm_v2(trace)
        elif "remasking_strategy" in given:
            own = _sdar(trace)
        elif "remasking" in given:
            own = _llada(trace)
        elif "delete_token_id" in given:
            own = _llada2_2(trace)
        elif "block_length" in given:
            own = _llada2(trace)
        else:
            raise ConfigError(f"decode: none of {', '.join(sorted(given))} is known to name a family's code")
        shared = {"mask_token_id": given["mask_id"], "num_lookahead": 0, "sampling_strategy": "default"}
        if "delete_token_id" not in given:
            shared["mask_probability"] = "counted"
        return DecodeConfig.model_validate({**shared, **own})
    except KeyError as error:
        raise ConfigError(f"decode.{error.args[0]}: missing or of a value that is not known here") from None
    except ValidationError as error:
        raise ConfigError(f"decode: {error.errors()[0]['msg']}") from None
    except (TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"decode: its values make no settings ({error}): restore the file") from None


def _to_block_end(trace: FamilyTrace, num_tokens: int, block_size: int) -> int:
    """Tokens after the prompt up to the end of the block in which this many end; blocks count from position 0."""
    length = len(trace.prompt)
    return -(-(length + num_tokens) // block_size) * block_size - length


def _llada(trace: FamilyTrace) -> dict[str, Any]:
    given = trace.decode
    size, cache = given["block_length"], _CACHES[trace.source.function]
    num_steps = given["steps"] // (given["gen_length"] // size)
    strategy = {"name": "fast_dllm", "cache": cache, "cfg_scale": given["cfg_scale"]}
    own: dict[str, Any] = {"block_size": size, "max_new_tokens": given["gen_length"], "eos_token_id": -1}
    if given["threshold"] is not None:
        own |= {"fill_rule": "threshold", "skip_threshold": given["threshold"]}
    elif given["factor"] is not None:
        own["fill_rule"] = f"factor(f={given['factor']})"
    else:
        own["fill_rule"] = f"static(steps={num_steps})"
    if cache == "dual":
        is_older = trace.source.commit.startswith(_DUAL_WITHOUT_CAP)
        strategy |= {"min_block_steps": 2} if is_older else {"max_block_steps": num_steps}
    return own | {"strategy": strategy}


def _sdar(trace: FamilyTrace) -> dict[str, Any]:
    given = trace.decode
    size, rule, stops = given["block_length"], _SDAR_RULES[given["remasking_strategy"]], given["stop_tokens"] or [-1]
    own = {
        "strategy": {"name": "block_diffusion", "commit": "separate", "end_at": "block"}, "block_size": size,
        "max_new_tokens": _to_block_end(trace, given["gen_length"], size), "eos_token_id": stops[0],
    }  # fmt: skip
    if rule == "entropy_bounded":
        bounded = f"entropy_bounded(bound={given['eb_threshold']})"
        return own | {"fill_rule": bounded, "sampling_strategy": "neg_entropy"}
    counted = f"{rule}(steps={given['denoising_steps']})"
    return own | {"fill_rule": counted, "skip_threshold": given["confidence_threshold"]}


def _fast_dllm_v2(trace: FamilyTrace) -> dict[str, Any]:
    given = trace.decode
    size = given["block_size"]
    first = size - len(trace.prompt) % size  # what the first block takes of the answer
    num_tokens = first + (given["max_new_tokens"] // size - 1) * size + 1  # the last pass predicts one beyond
    strategy = {
        "name": "fast_dllm_v2", "sub_block_size": given["small_block_size"],
        "cache": "dual" if given["use_block_cache"] else "prefix",
        "end_at": "block" if trace.source.function == "batch_sample" else "token",
    }  # fmt: skip
    return {
        "strategy": strategy, "block_size": size, "max_new_tokens": num_tokens, "skip_threshold": given["threshold"],
        "eos_token_id": given["stop_token"],
    }  # fmt: skip


def _llada2(trace: FamilyTrace) -> dict[str, Any]:
    given = trace.decode
    size, is_cached = given["block_length"], not trace.source.function.endswith("generate")
    strategy = {
        "name": "block_diffusion", "cache": "prefix" if is_cached else "none", "commit": "separate", "end_at": "block",
        "penalty_lambda": given.get("penalty_lambda", 0),
    }  # fmt: skip
    own: dict[str, Any] = {
        "block_size": size, "skip_threshold": given["threshold"],
        "max_new_tokens": _to_block_end(trace, given["gen_length"], size), "eos_token_id": given.get("eos_token", -1),
    }  # fmt: skip
    if "steps" in given:
        own["fill_rule"] = f"dynamic(steps={min(given['steps'], size)})"
    for edit, limit in (("editing_threshold", "max_post_steps"), ("edit_threshold", "max_post_edit_steps")):
        if edit in given:
            strategy |= {"edit_threshold": given[edit], "max_post_edit_steps": given[limit]}
    return own | {"strategy": strategy}


def _llada2_2(trace: FamilyTrace) -> dict[str, Any]:
    given = trace.decode
    strategy = {"name": "levenshtein"} | {key: given[key] for key in ("delete_token_id", "split_token_id")}
    if "editing_threshold" in given:
        strategy |= {
            "variant": "fluxserve", "edit_threshold": given["editing_threshold"], "steps": given["steps"],
            "max_post_edit_steps": given["max_post_steps"], "max_block_steps": given["max_steps_per_block"],
        }  # fmt: skip
    else:
        budget = given["max_post_edit_steps"]
        strategy |= {
            "variant": "sglang", "edit_threshold": given["edit_threshold"], "max_post_edit_steps": budget,
        }  # fmt: skip
    return {
        "strategy": strategy, "block_size": given["block_length"], "skip_threshold": given["threshold"],
        "max_new_tokens": given["gen_length"], "eos_token_id": given["stop_tokens"][0],
        "stop_token_ids": given["stop_tokens"][1:],
    }  # fmt: skip
