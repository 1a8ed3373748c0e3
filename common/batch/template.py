"""`input.prompt_template`: text with names of a line's fields in braces.

A name begins with a letter or an underscore and goes on with letters, digits, `_` and `-`: `{question}`, `{Question}`,
`{q1}`, `{my-field}`. Braces around anything else, such as `{}`, `{0}`, `{ x }` or `{a + b}`, are text, so that a
template may hold code. A field is text, a number, or a list, which becomes one line an item.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import ConfigError

_FIELD = re.compile(r"\{([^\W\d][\w-]*)\}")
_MOST_SHOWN = 12


def fits(template: str, fields: Mapping[str, Any]) -> bool:
    """Whether the line has every field that the template names."""
    values = [fields.get(name) for name in _FIELD.findall(template)]
    return bool(values) and all(
        isinstance(one, (str, list, int, float)) and not isinstance(one, bool) for one in values
    )


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """Fill in the fields. str.format would fail on the braces of code."""

    def text(match: re.Match[str]) -> str:
        value = fields[match[1]]
        return "\n".join(map(str, value)) if isinstance(value, list) else str(value)

    return _FIELD.sub(text, template)


def require_fit(template: str, lines: Sequence[Mapping[str, Any]], path: str) -> None:
    """Raise ConfigError if the template names what no line has, or fits none of them."""
    counts = Counter(name for fields in lines for name in fields if _FIELD.fullmatch(f"{{{name}}}"))
    there = ", ".join(f"{{{name}}}" for name, _ in counts.most_common(_MOST_SHOWN)) or "none"
    names = dict.fromkeys(_FIELD.findall(template))
    absent = [f"{{{name}}}" for name in names if not any(name in fields for fields in lines)]
    if absent:
        raise ConfigError(
            f"{path}: no line has {', '.join(absent)}, which input.prompt_template names, and not all have prompt or "
            f"messages (they have {there}): rename a field, or name theirs, as in "
            "--set input.prompt_template='{text}'; braces that are meant as text need spaces inside"
        )
    if not any(fits(template, fields) for fields in lines):
        raise ConfigError(
            f"{path}: input.prompt_template {template!r} fits no line: name fields of its lines in braces "
            f"(they have {there}), or remove it"
        )
