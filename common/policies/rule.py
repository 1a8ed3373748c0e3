"""Register the rules that ship, and the numbers that settings give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from common.compiled import compiled

Function = TypeVar("Function", bound=Callable[..., Any])
PLUG_IN = -1  # the code of every rule that does not ship
MOST = 10**6  # of numbers, which stand beside probabilities and counts of tokens: finite in all that they go into


class Number(NamedTuple):
    """A number that a rule takes as `name(number=0.5)`. least, most: what it may be. excludes_least: it is more than
    that. is_whole: it counts something. shown: the default in words, where it is no number."""

    default: float
    least: float = -MOST
    most: float = MOST
    excludes_least: bool = False
    is_whole: bool = False
    shown: str | None = None

    def why_not(self, value: float) -> str | None:
        """Return what to set it to instead; None if it may have this value."""
        if self.is_whole and value != int(value):
            return "a whole number"
        if value < self.least or value > self.most or (self.excludes_least and value == self.least):
            if self.excludes_least:
                return f"a number above {self.least}, at most {self.most}"
            return f"a number between {self.least} and {self.most}"
        return None


class Rule(NamedTuple):
    """code: what the loops know it by. kind: stands before the names of its numbers in SETTINGS."""

    code: int
    kind: str
    numbers: dict[str, Number]


class Rules(dict[str, Rule]):
    """Rules of one kind by name. common: numbers that each of them takes, other packages' too; a rule may have another
    default."""

    def __init__(self, kind: str, **common: Number) -> None:
        super().__init__()
        self._kind = kind
        self.plug_in = Rule(PLUG_IN, kind, common)

    def add(self, name: str, code: int, **numbers: float | Number) -> Callable[[Function], Function]:
        """Compile the decorated function and enter it under its name in YAML. numbers: what it takes, or its
        defaults."""
        own = {key: number if isinstance(number, Number) else Number(number) for key, number in numbers.items()}

        def entered(function: Function) -> Function:
            self[name] = Rule(
                code, self._kind, own | {key: own.get(key, it) for key, it in self.plug_in.numbers.items()}
            )
            return compiled(function)

        return entered


def enter(own: Any, setting: str, rule: Rule, numbers: dict[str, float]) -> None:
    """Write a rule and its numbers into a record of SETTINGS. setting: `branch_score`, `spawn_rule`, ..."""
    own[setting] = rule.code
    for name, number in rule.numbers.items():
        own[f"{rule.kind}_{name}"] = numbers.get(name, number.default)


@compiled
def most_confident(confidence_M: Any, count: int, is_chosen_M: Any) -> None:
    """Mark the `count` most confident that are not marked yet; of equal ones the first."""
    for _ in range(min(count, len(confidence_M))):
        best = -1
        for place in range(len(confidence_M)):
            if not is_chosen_M[place] and (best < 0 or confidence_M[place] > confidence_M[best]):
                best = place
        if best >= 0:
            is_chosen_M[best] = True


@compiled
def descending(values_M: Any, order_M: Any) -> None:
    """Write the places of the values from the highest on; of equal ones the first comes first."""
    for place in range(len(values_M)):
        at = place
        while at and values_M[order_M[at - 1]] < values_M[place]:
            order_M[at] = order_M[at - 1]
            at -= 1
        order_M[at] = place


@compiled
def sort(values_M: Any) -> None:
    """Put the values in ascending order, where they are (Shell 1959)."""
    gap = len(values_M) // 2
    while gap:
        for place in range(gap, len(values_M)):
            value, at = values_M[place], place
            while at >= gap and values_M[at - gap] > value:
                values_M[at] = values_M[at - gap]
                at -= gap
            values_M[at] = value
        gap //= 2
