"""A request's settings as the compiled loops read them: a record with DecodeConfig's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.compiled import Records, records

# Numbers of rules (`name(number=0.5)`) have the rule's kind in front of their own name.
SETTINGS = np.dtype(
    [
        ("strategy", np.int32), ("num_lookahead", np.int32), ("block_size", np.int32), ("max_new_tokens", np.int32),
        ("sub_block_size", np.int32), ("cache", np.int32), ("cache_delay", np.int32),
        ("min_block_steps", np.int32), ("max_block_steps", np.int32), ("max_post_edit_steps", np.int32),
        ("variant", np.int32), ("steps", np.int32),  # levenshtein
        ("edits", np.bool_), ("commits_apart", np.bool_), ("ends_at_block", np.bool_), ("stop_at_eos", np.bool_),
        ("is_causal", np.bool_), ("is_fresh", np.bool_), ("edit_threshold", np.float64),
        ("block_add_threshold", np.float64), ("decoded_token_threshold", np.float64), ("skip_threshold", np.float64),
        ("branch_score", np.int32), ("spawn_rule", np.int32), ("fill_rule", np.int32), ("lookahead_rule", np.int32),
        ("score_created", np.float64), ("score_bottom_share", np.float64), ("score_soon", np.float64),
        ("score_trust", np.float64), ("score_risk", np.float64),
        ("spawn_blocks", np.int32), ("spawn_entropy", np.float64), ("spawn_probability", np.float64),
        ("spawn_share", np.float64), ("spawn_tokens", np.int32), ("spawn_ratio", np.float64),
        ("spawn_mass", np.float64),
        ("fill_steps", np.int32), ("fill_below", np.float64), ("fill_bound", np.float64), ("fill_f", np.float64),
        ("fill_share", np.float64), ("fill_delta", np.float64),
        ("lookahead_plenty", np.float64), ("lookahead_share", np.float64), ("lookahead_variance", np.float64),
    ],
    align=True,
)  # fmt: skip

STRATEGIES = ("d2f", "multi_block", "fast_dllm", "vanilla", "block_diffusion", "fast_dllm_v2", "levenshtein")
D2F, MULTI_BLOCK, FAST_DLLM, VANILLA, BLOCK_DIFFUSION, FAST_DLLM_V2, LEVENSHTEIN = range(len(STRATEGIES))
CACHES = ("prefix", "dual", "none")
PREFIX, DUAL, NONE = range(len(CACHES))
VARIANTS = ("checkpoint", "fluxserve", "sglang")  # of levenshtein
CHECKPOINT, FLUXSERVE, SGLANG = range(len(VARIANTS))

# Fields that hold the code of what is named, or what follows from several settings.
_CODED = {"strategy", "cache", "variant", "branch_score", "spawn_rule", "fill_rule", "lookahead_rule"}

_NAMES = [name for name in SETTINGS.names or () if name not in _CODED]


def settings_of(decode: Any) -> Records:
    """Return [1] SETTINGS without the rules. decode: a DecodeConfig.

    A field with the name of a setting, or of a setting of the strategy, holds it; 0 stands for `null` and for what the
    strategy has not.
    """
    made_1, strategy = records(np.zeros(1, SETTINGS)), decode.strategy
    own = made_1[0]
    for name in _NAMES:
        own[name] = getattr(decode, name, None) or getattr(strategy, name, None) or 0
    own["strategy"], own["cache"] = STRATEGIES.index(strategy.name), CACHES.index(strategy.cached)
    own["variant"] = VARIANTS.index(getattr(strategy, "variant", VARIANTS[0]))
    own["sub_block_size"] = own["sub_block_size"] or decode.block_size
    own["edits"] = getattr(strategy, "edit_threshold", None) is not None
    own["commits_apart"] = getattr(strategy, "commit", "fused") == "separate"
    own["ends_at_block"] = getattr(strategy, "end_at", "token") == "block"
    own["is_causal"], own["is_fresh"] = decode.window_attention == "block_causal", decode.shift_row == "fresh"
    return made_1
