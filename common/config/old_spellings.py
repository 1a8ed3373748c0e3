"""Keys of earlier versions: whoever writes one is told the new spelling in a sentence, and what an earlier version has
recorded is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from common.config.explain import given_value
from common.config.strategies import as_section, in_full, with_key


class _Number(NamedTuple):
    """A key that is a number of rules now. rules: those that looked at it, the usual one first; none: all."""

    setting: str
    name: str
    rules: tuple[str, ...]
    usual: str
    default: Any


_NUMBERS = {
    "denoising_steps": _Number("fill_rule", "steps", ("static", "dynamic", "sequential"), "static", None),
    "entropy_bound": _Number("fill_rule", "bound", ("entropy_bounded",), "entropy_bounded", 0.35),
    "entropy_threshold": _Number("fill_rule", "below", ("entropy",), "entropy", 0.5),
    "factor": _Number("fill_rule", "f", ("factor",), "factor", 1.0),
    "bottom_share": _Number("branch_score", "bottom_share", ("mean",), "mean", 1.0),
    "creation_weight": _Number("branch_score", "created", (), "mean", 0.0),
    "spawn_blocks": _Number("spawn_rule", "blocks", (), "confident", "all"),
}
_OF_STRATEGY = {
    "edit_threshold": None, "max_post_edit_steps": 16, "penalty_lambda": 0.0, "commit": "fused", "end_at": "token",
    "cache": "prefix", "cache_delay": 0, "cfg_scale": 0.0, "min_block_steps": 1, "max_block_steps": None,
    "sub_block_size": None, "reuse_prefix": False,
}  # fmt: skip  # with the defaults that they had


def renewed(decode: Mapping[str, Any], *, with_defaults: bool = False) -> dict[str, Any]:
    """Return keys of `decode` by their new spelling, without settings of another strategy or rule than the one that is
    named. with_defaults: what only says a default is kept too."""
    new = {key: value for key, value in decode.items() if key not in _NUMBERS and key not in _OF_STRATEGY}
    for key, value in decode.items():
        if key in _OF_STRATEGY and (with_defaults or value != _OF_STRATEGY[key]):
            _enter(new, key, value)
        elif key in _NUMBERS and (with_defaults or value != _NUMBERS[key].default):
            _give(new, _NUMBERS[key], value)
    return new


def recorded(decode: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this or an earlier version has recorded of `decode` as this one records it."""
    new = renewed(decode)
    return {**new, "strategy": in_full(new["strategy"])} if "strategy" in new else new


def why_old(decode: Mapping[str, Any]) -> str | None:
    """Say how to write the keys of earlier versions that are there; None: there are none."""
    old = [key for key in decode if key in _NUMBERS or key in _OF_STRATEGY]
    if not old:
        return None
    new = renewed(decode, with_defaults=True)
    written = ", ".join(f"{key}: {_written(new[key])}" for key in new if new[key] != decode.get(key))
    what = f"{' and '.join(old)} {'is no key' if len(old) == 1 else 'are no keys'} of decode any more"
    return f"{what}: write {written}" if written else f"{what}: remove {'it' if len(old) == 1 else 'them'}"


def _enter(new: dict[str, Any], key: str, value: Any) -> None:
    """Write a key into the strategy: the one that is named, if it has the key, or the first that has."""
    homes, given = with_key(key), as_section(new.get("strategy"))
    section = dict(given) if isinstance(given, Mapping) else {}
    if section.get("name") not in homes:
        if "name" in section:
            return
        section = {"name": homes[0], **section}
    new["strategy"] = {**section, key: value}


def _give(new: dict[str, Any], number: _Number, value: Any) -> None:
    """Write a number into the rule that is named, if it takes it, or into the usual one."""
    given = new.get(number.setting)
    rule = given if isinstance(given, str) else number.usual
    if number.rules and rule.partition("(")[0] not in number.rules:
        return
    if value in (None, "all"):
        new[number.setting] = rule
        return
    argument = f"{number.name}={1 if value == 'first' else _written(value)}"
    new[number.setting] = f"{rule[:-1]}, {argument})" if rule.endswith(")") else f"{rule}({argument})"


def _written(value: Any) -> str:
    """A value as YAML has it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_written(each)}' for key, each in value.items())}}}"
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return value if isinstance(value, str) and len(value) < 100 else given_value(value)


_OF_PROFILE = {
    "enforce_eager": "set graph.mode to eager",
    "processes_per_node": "set NNODES where it is started: each node starts as many",
    **{
        key: f"write it as npu.{key}"
        for key in (
            "attention", "kv_view", "weight_prefetch_mb", "cores", "selftest", "start_timeout_s", "row_buckets",
            "max_graphs", "length_updates", "cache_dir",
        )
    },
}  # fmt: skip


def why_old_of_serve(section: Mapping[str, Any]) -> str | None:
    """Say what became of the first limit of `serve` that is fixed by now."""
    old = next((key for key in section if key in ("max_prompts", "max_stop_strings")), None)
    return None if old is None else f"{old} is no key of serve any more: the limit is fixed, remove the key"


def is_old_of_profile(key: str) -> bool:
    return key in _OF_PROFILE


def why_old_of_profile(section: Mapping[str, Any]) -> str | None:
    """Say how to write the first key of a profile, or of its `graph`, that an earlier version had there."""
    old = next((key for key in section if key in _OF_PROFILE), None)
    return None if old is None else f"{old} is no key there any more: {_OF_PROFILE[old]}"
