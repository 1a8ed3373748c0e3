"""Policies by the folder they lie in and what a setting calls them: `name`, or `name(number=0.5)`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from math import isfinite
from pathlib import Path
from typing import Any

from common.errors import first_line
from common.policies.checked import checked

# Folder -> what its files define.
_FUNCTION_OF = {
    "branch_scores": "score", "spawn_rules": "rank", "fill_rules": "choose", "lookahead_rules": "count",
    "token_confidences": "confidence",
}  # fmt: skip
_MOST = 10**6  # of numbers, which stand beside probabilities and counts of tokens: finite in all that they go into
_CALL = re.compile(r"(\w+)(?:\((.*)\))?")


@cache
def shipped(folder: str) -> tuple[str, ...]:
    """Names of this package's own."""
    files = (Path(__file__).parent / folder).glob("[!_]*.py")
    return tuple(sorted(file.stem for file in files))


def names(folder: str) -> tuple[str, ...]:
    """All that may be chosen, installed packages' included."""
    return (*shipped(folder), *sorted(_installed(folder).keys() - set(shipped(folder))))


@cache
def policy(folder: str, setting: str) -> Callable[..., Any]:
    """The function that a setting names, with its numbers. Raises ValueError for what is not there, in a sentence."""
    call = _CALL.fullmatch(setting)
    if call is None or call[1] not in names(folder):
        raise ValueError(f"set it to one of {', '.join(names(folder))}")
    found = _loaded(folder, call[1])
    parameters = inspect.signature(found).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    given = _numbers(call[2] or "")
    if given is None or given.keys() - set(known):
        has = f"takes {', '.join(known)}, as in {call[1]}({known[0]}=1)" if known else "takes no numbers"
        raise ValueError(f"{call[1]} {has}")
    beyond = next((name for name, number in given.items() if abs(number) > _MOST), None)
    if beyond is not None:
        raise ValueError(f"{call[1]}: set {beyond} to a number between -{_MOST} and {_MOST}")
    if call[1] in shipped(folder) and not given:
        return found  # known, and every step of a request calls some
    return checked(folder, setting, partial(found, **given))


def _numbers(text: str) -> dict[str, float] | None:
    """Of `a=1, b=0.5`, each once and finite; None if it is something else."""
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


def _loaded(folder: str, name: str) -> Callable[..., Any]:
    """Raises ValueError for a file or package that is broken, in a sentence."""
    try:
        found = _function(folder, name)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"the policy {name} cannot be loaded ({reason}): correct or remove it") from error
    if not callable(found):
        raise ValueError(f"the policy {name} is {type(found).__name__}, no function: correct or remove it")
    return found


def _function(folder: str, name: str) -> Callable[..., Any]:
    if name in shipped(folder):
        module = import_module(f"common.policies.{folder}.{name}")
        own: Callable[..., Any] = getattr(module, _FUNCTION_OF[folder])
        return own
    installed: Callable[..., Any] = _installed(folder)[name].load()
    return installed


def origins() -> dict[str, str]:
    """`folder.name` -> name and version of the other package that a policy is from."""
    found = {f"{folder}.{name}": point.dist for folder in _FUNCTION_OF for name, point in _installed(folder).items()}
    return {name: f"{dist.name} {dist.version}" for name, dist in found.items() if dist is not None}


@cache
def _installed(folder: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"lopa.{folder}")}
