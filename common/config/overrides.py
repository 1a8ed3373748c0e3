"""Settings given beside a file, by `--set key=value` or by a sweep, and what a sentence about one of them names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.config.explain import wants_text
from common.config.frozen import Frozen
from common.config.strategies import as_section, merged
from common.config.yaml_file import parse_yaml, why_not_yaml
from common.errors import ConfigError

_MOST_SHOWN = 200  # characters
_NOTHING = ("null", "Null", "NULL", "~")  # in YAML


@dataclass(frozen=True, slots=True)
class Override:
    """text: `key=value`, a dotted key and a YAML value. given_as: where it stands, as sentences name it."""

    text: str
    given_as: str = "--set"

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.text.partition("=")[0].split("."))

    def __str__(self) -> str:
        return f"{self.given_as} {self.text[:_MOST_SHOWN]}{' ...' if len(self.text) > _MOST_SHOWN else ''}"


@dataclass(frozen=True, slots=True)
class Origins:
    """The places that the settings of a tree come from."""

    path: Path
    overrides: Sequence[Override] = ()

    def of(self, location: Sequence[str]) -> str:
        """The override that has set this key, else the file; of a section the file with the overrides within."""
        place = tuple(location)
        setting = [override for override in self.overrides if place[: len(override.keys)] == override.keys]
        if setting:
            return str(setting[-1])
        within = [str(override) for override in self.overrides if override.keys[: len(place)] == place]
        return " with ".join([str(self.path), *([" ".join(within)] if within else [])])


def as_overrides(given: Sequence[str | Override]) -> list[Override]:
    """A text is of `--set`."""
    return [Override(one) if isinstance(one, str) else one for one in given]


def apply_override(tree: dict[str, Any], override: Override, kind: type[Frozen]) -> None:
    """Set the key in the tree, which becomes settings of this kind. Raises ConfigError."""
    *parents, leaf = override.keys
    _, separator, text = override.text.partition("=")
    if not separator or not all((*parents, leaf)):
        raise ConfigError(f"{override}: write key=value, for example --set decode.num_lookahead=7")
    value = _value(override, text, wants_text(kind, override.keys))
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if parent == "strategy":
            child = node[parent] = as_section(child)
        if not isinstance(child, dict):
            raise ConfigError(f"{override}: {parent} is a single value, not a section")
        node = child
    node[leaf] = merged(node.get(leaf), value) if leaf == "strategy" else value


def _value(override: Override, text: str, is_text: bool) -> Any:
    """YAML; but what is a text is taken as it stands, so that `-`, `{question}`, 1.0 and a file's name with # need no
    quotes in quotes. These may stand around it all the same."""
    if not text:
        return None
    if is_text and text not in _NOTHING and text[0] not in "'\"":
        return text
    try:
        value = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if not is_text:
            raise ConfigError(f"{override}: the value is not valid YAML ({why_not_yaml(error)}); quote it") from None
        value = text
    return text if is_text and value is not None and not isinstance(value, str) else value
