"""Are two results of a program the same? Both are what JSON holds."""

from __future__ import annotations


def is_same(left: object, right: object) -> bool:
    """Equal in value and type, all the way down: True is not 1, and 2.0 is not 2 either."""
    pairs = [(left, right)]
    while pairs:
        one, other = pairs.pop()
        if type(one) is not type(other):
            return False
        if isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            pairs += zip(one, other, strict=True)
        elif isinstance(one, dict) and isinstance(other, dict):
            if one.keys() != other.keys():
                return False
            pairs += [(one[key], other[key]) for key in one]
        elif one != other:
            return False
    return True
