"""Find policies by kind and by what a setting calls them: `name`, or `name(number=0.5)`."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from math import isfinite
from typing import Any

from common.errors import did_you_mean, first_line
from common.policies import branch_scores, fill_rules, lookahead_rules, spawn_rules
from common.policies.checked import checked
from common.policies.rule import Number, Rule, Rules
from common.policies.token_confidences import TOKEN_CONFIDENCES

logger = logging.getLogger(__name__)

_SHIPPED: dict[str, Rules] = {
    "branch_scores": branch_scores.BRANCH_SCORES,
    "spawn_rules": spawn_rules.SPAWN_RULES,
    "fill_rules": fill_rules.FILL_RULES,
    "lookahead_rules": lookahead_rules.LOOKAHEAD_RULES,
}
_CALL = re.compile(r"(\w+)(?:\((.*)\))?")


@cache
def shipped(kind: str) -> tuple[str, ...]:
    """Return the names of this package's policies."""
    return tuple(sorted(TOKEN_CONFIDENCES if kind == "token_confidences" else _SHIPPED[kind]))


def calls(kind: str) -> list[str]:
    """Return this package's own, each with the defaults of the numbers that are its alone."""
    if kind not in _SHIPPED:
        return list(shipped(kind))
    rules = _SHIPPED[kind]
    own = {name: [key for key in rules[name].numbers if key not in rules.plug_in.numbers] for name in shipped(kind)}
    return [_call(name, {key: rules[name].numbers[key] for key in keys}) for name, keys in own.items()]


def _call(name: str, numbers: Mapping[str, Number]) -> str:
    shown = ", ".join(f"{key}={number.shown or format(number.default, 'g')}" for key, number in numbers.items())
    return f"{name}({shown})" if shown else name


def names(kind: str) -> tuple[str, ...]:
    """Return all names that may be chosen, those of installed packages included."""
    return (*shipped(kind), *sorted(_installed(kind).keys() - set(shipped(kind))))


def check(kind: str, setting: str) -> None:
    """Raise ValueError for an unknown name, and for numbers that its policy does not take."""
    name, numbers = _named(kind, setting)
    if name not in shipped(kind):
        policy(kind, setting)
    else:
        _check_numbers(name, numbers, _SHIPPED[kind][name].numbers if kind in _SHIPPED else {})


@cache
def policy(kind: str, setting: str) -> Callable[..., Any]:
    """Return the function of a token confidence, or of another package's policy with its numbers bound. Raises
    ValueError if it cannot be loaded, or does not take the numbers."""
    name, numbers = _named(kind, setting)
    if kind == "token_confidences" and name in TOKEN_CONFIDENCES:
        return TOKEN_CONFIDENCES[name]
    found = _loaded(kind, name)
    parameters = inspect.signature(found).parameters.values()
    common = _SHIPPED[kind].plug_in.numbers if kind in _SHIPPED else {}
    own = {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    _check_numbers(name, numbers, {**dict.fromkeys(own, Number(0)), **common})
    for each, default in own.items():
        if default is inspect.Parameter.empty and each not in (numbers or {}):
            raise ValueError(f"{name} needs {each}, as in {name}({each}=1)")
    given = {each: number for each, number in (numbers or {}).items() if each in own}
    return checked(kind, setting, partial(found, **given))


def rule_of(kind: str, setting: str) -> tuple[Rule, dict[str, float]]:
    """Return the code of a setting's rule for the loops, and its numbers; PLUG_IN is the code of another package's."""
    name, numbers = parsed(setting)
    rules = _SHIPPED[kind]
    return rules.get(name, rules.plug_in), numbers


def number_of(kind: str, setting: str, name: str) -> float:
    """Return a number of a setting's rule, given or not."""
    rule, numbers = rule_of(kind, setting)
    return numbers.get(name, rule.numbers[name].default)


def parsed(setting: str) -> tuple[str, dict[str, float]]:
    """Return the name and numbers of a setting that `policy` takes."""
    call = _CALL.fullmatch(setting)
    assert call is not None, "settings are checked when they are read"
    return call[1], _numbers(call[2] or "") or {}


def _named(kind: str, setting: str) -> tuple[str, dict[str, float] | None]:
    call = _CALL.fullmatch(setting)
    if call is None or call[1] not in names(kind):
        hint = did_you_mean(setting.partition("(")[0], names(kind))
        raise ValueError(f"{hint}set it to one of {', '.join(names(kind))}")
    return call[1], _numbers(call[2] or "")


def _check_numbers(name: str, numbers: dict[str, float] | None, known: Mapping[str, Number]) -> None:
    if numbers is None or numbers.keys() - known.keys():
        has = f"takes {', '.join(known)}, as in {name}({next(iter(known))}=1)" if known else "takes no numbers"
        raise ValueError(f"{name} {has}")
    for each, value in numbers.items():
        if (wanted := known[each].why_not(value)) is not None:
            raise ValueError(f"{name}: set {each} to {wanted}")


def _numbers(text: str) -> dict[str, float] | None:
    """Return the numbers of `a=1, b=0.5`, each once and finite; None if the text is something else."""
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (word.strip() for word in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            return None
        if name in found or not isfinite(number):
            return None
        found[name] = number
    return found


def _loaded(kind: str, name: str) -> Callable[..., Any]:
    """Load the function of an entry point. Raises ValueError if the package is broken."""
    try:
        found: Callable[..., Any] = _installed(kind)[name].load()
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"the policy {name} cannot be loaded ({reason}): correct or remove it") from error
    if not callable(found):
        raise ValueError(f"the policy {name} is {type(found).__name__}, no function: correct or remove it")
    return found


def origins() -> dict[str, str]:
    """Return `kind.name` -> name and version of the package that a policy is from, for policies of others."""
    kinds = (*_SHIPPED, "token_confidences")
    found = {f"{kind}.{name}": point.dist for kind in kinds for name, point in _installed(kind).items()
             if name not in shipped(kind)}  # fmt: skip
    return {name: f"{dist.name} {dist.version}" for name, dist in found.items() if dist is not None}


@cache
def _installed(kind: str) -> dict[str, EntryPoint]:
    points = {point.name: point for point in entry_points(group=f"lopa.{kind}")}
    for name in points.keys() & set(shipped(kind)):
        logger.warning("%s %s of another package is not used: this package has one of that name", kind, name)
    return points
