"""A request's settings as compiled loops read them: a record with DecodeConfig's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.compiled import Records, records

# Numbers of rules (`name(number=0.5)`) have the rule's kind in front of their own name.
SETTINGS = np.dtype(
    [
        ("strategy", np.int32), ("num_lookahead", np.int32), ("block_size", np.int32), ("max_new_tokens", np.int32),
        ("sub_block_size", np.int32), ("cache", np.int32), ("cache_delay", np.int32), ("denoising_steps", np.int32),
        ("min_block_steps", np.int32), ("max_block_steps", np.int32), ("max_post_edit_steps", np.int32),
        ("edits", np.bool_), ("commits_apart", np.bool_), ("ends_at_block", np.bool_), ("stop_at_eos", np.bool_),
        ("spawns_in_first", np.bool_), ("is_causal", np.bool_), ("is_fresh", np.bool_),
        ("block_add_threshold", np.float64), ("decoded_token_threshold", np.float64), ("skip_threshold", np.float64),
        ("edit_threshold", np.float64), ("entropy_threshold", np.float64), ("entropy_bound", np.float64),
        ("factor", np.float64), ("bottom_share", np.float64), ("creation_weight", np.float64),
        ("branch_score", np.int32), ("spawn_rule", np.int32), ("fill_rule", np.int32), ("lookahead_rule", np.int32),
        ("score_soon", np.float64), ("score_trust", np.float64), ("score_risk", np.float64),
        ("spawn_probability", np.float64), ("spawn_share", np.float64), ("fill_share", np.float64),
        ("lookahead_plenty", np.float64), ("lookahead_share", np.float64),
    ],
    align=True,
)  # fmt: skip

STRATEGIES = ("d2f", "multi_block", "fast_dllm", "vanilla", "block_diffusion", "fast_dllm_v2")
D2F, MULTI_BLOCK, FAST_DLLM, VANILLA, BLOCK_DIFFUSION, FAST_DLLM_V2 = range(len(STRATEGIES))
CACHES = ("prefix", "dual", "none")
PREFIX, DUAL, NONE = range(len(CACHES))

_SAME = (
    "num_lookahead", "block_size", "max_new_tokens", "cache_delay", "min_block_steps", "max_post_edit_steps",
    "stop_at_eos", "block_add_threshold", "decoded_token_threshold", "skip_threshold", "entropy_threshold",
    "entropy_bound", "factor", "bottom_share", "creation_weight",
)  # fmt: skip


def settings_of(decode: Any) -> Records:
    """[1] SETTINGS without the rules. decode: a DecodeConfig. What is `null` there is 0."""
    made_1 = records(np.zeros(1, SETTINGS))
    own = made_1[0]
    for name in _SAME:
        own[name] = getattr(decode, name)
    own["strategy"], own["cache"] = STRATEGIES.index(decode.strategy), CACHES.index(decode.cache)
    own["sub_block_size"] = decode.sub_block_size or decode.block_size
    own["denoising_steps"], own["max_block_steps"] = decode.denoising_steps or 0, decode.max_block_steps or 0
    own["edits"], own["edit_threshold"] = decode.edit_threshold is not None, decode.edit_threshold or 0.0
    own["commits_apart"], own["ends_at_block"] = decode.commit == "separate", decode.end_at == "block"
    own["spawns_in_first"], own["is_fresh"] = decode.spawn_blocks == "first", decode.shift_row == "fresh"
    own["is_causal"] = decode.window_attention == "block_causal"
    return made_1
