"""What a config.json says of rotary embeddings. transformers 4 writes `rope_theta` and `partial_rotary_factor` beside
`rope_scaling`, transformers 5 all inside `rope_parameters`, which may hold a set for each type of layer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.checkpoint.families.fields import FIX, Fields
from common.checkpoint.folder import shown

logger = logging.getLogger(__name__)
_LEAST_THETA, _LARGEST_THETA = 1.0, 1e12
_LAYER_TYPES = ("full_attention", "sliding_attention")
_NOTHING_AT_FACTOR_1 = ("linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class Rotary:
    """theta: the base of the angles. share: the part of a head's dimensions that is rotated, its first ones."""

    theta: float
    share: float


def read_rotary(fields: Fields) -> Rotary:
    """What stands in `rope_scaling` or `rope_parameters` goes before the same key outside. Raises ConfigError."""
    key, rope = _parameters(fields)
    _check_unscaled(fields, key, rope)
    theta, share = (_placed(fields, key, rope, name) for name in ("rope_theta", "partial_rotary_factor"))
    if fields.is_known("partial_rotary_factor"):
        part = fields.number(share[0], share[1], at_least=0, at_most=1)
    elif share[1] not in (None, 1):
        raise fields.error(share[0], f"{shown(share[1])} is not implemented, only 1; use another checkpoint")
    else:
        part = 1.0
    return Rotary(fields.number(theta[0], theta[1], at_least=_LEAST_THETA, at_most=_LARGEST_THETA), part)


def rotary_size(fields: Fields, head_size: int, share: float) -> int:
    size = int(head_size * share)
    if size % 2 or not size:
        raise fields.error(
            "partial_rotary_factor", f"{share:g} of heads of {head_size} is no even number of dimensions; {FIX}"
        )
    return size


def _parameters(fields: Fields) -> tuple[str, Mapping[str, Any]]:
    """The set for the layers, and its key. `rope_scaling` replaces `rope_parameters`, unless it is empty."""
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.get(key) or {}
    if not isinstance(rope, Mapping):
        return key, {"rope_type": rope}
    if not any(name in rope for name in _LAYER_TYPES):
        return key, rope
    inner = rope.get("full_attention")
    if not fields.is_known("layer_types") or not isinstance(inner, Mapping):
        raise fields.error(
            key, f"{shown(rope)} is not implemented, only one set for all layers; use another checkpoint"
        )
    return f"{key}.full_attention", inner


def _placed(fields: Fields, key: str, rope: Mapping[str, Any], name: str) -> tuple[str, Any]:
    value = rope.get(name)
    if value is None and name in rope and not fields.has(name):
        raise fields.error(f"{key}.{name}", f"null; {FIX}")
    if value is None:
        return name, fields.get(name)
    if fields.has(name) and fields.get(name) not in (None, value):
        logger.warning("%s: %s.%s is read, and %s outside of it, which differs, is not", fields.path, key, name, name)
    return f"{key}.{name}", value


def _check_unscaled(fields: Fields, key: str, rope: Mapping[str, Any]) -> None:
    factor = rope.get("factor")
    is_one = factor == 1 and not isinstance(factor, bool) and rope.get("attention_factor") in (None, 1)
    kinds = [rope[name] for name in ("rope_type", "type") if rope.get(name) is not None]
    if not kinds and factor is not None and not is_one:
        raise fields.error(f"{key}.factor", f"{shown(factor)} without a rope_type; use an unscaled checkpoint")
    for kind in kinds:
        if kind != "default" and not (is_one and kind in _NOTHING_AT_FACTOR_1):
            raise fields.error(
                key, f"rope type {shown(kind)} is not implemented, only default; use an unscaled checkpoint"
            )
