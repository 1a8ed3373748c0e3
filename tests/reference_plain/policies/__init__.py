"""The shipped policies as numpy functions, by name: what the compiled ones are held against."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

from common.policies.registry import parsed

_FUNCTION_OF = {"branch_scores": "score", "spawn_rules": "rank", "fill_rules": "choose", "lookahead_rules": "count"}


@cache
def policy(folder: str, setting: str) -> Callable[..., Any]:
    name, numbers = parsed(setting)
    function = getattr(import_module(f"reference_plain.policies.{folder}.{name}"), _FUNCTION_OF[folder])
    return partial(function, **numbers) if numbers else function
