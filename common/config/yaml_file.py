"""YAML as a tree of plain values, bounded before anything walks it. Raises ConfigError naming the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError, first_line, why_no_file

_MAX_BYTES = 2**20
_MAX_DEPTH = 20
_MAX_VALUES = 10_000  # aliases counted as often as they stand for something
_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(path: Path) -> dict[str, Any]:
    """A file of settings: a mapping."""
    if not path.is_file():
        raise ConfigError(f"{path}: {why_no_file(path)}; configs/ holds examples")
    if path.stat().st_size > _MAX_BYTES:
        raise ConfigError(f"{path}: larger than a settings file can be (1 MiB): give the right file")
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML ({why_not_yaml(error)})") from None
    if not isinstance(tree, dict):
        found = "a list" if isinstance(tree, list) else "nothing" if tree is None else "a single value"
        raise ConfigError(f"{path}: expected settings as key: value, found {found}")
    return tree


def parse_yaml(text: str) -> Any:
    """One document. Raises YAMLError, ValueError or RecursionError."""
    loader = _UniqueKeys(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, {}, depth=1)
        return loader.construct_document(node)
    except (LookupError, AttributeError, TypeError, OverflowError) as error:
        # From yaml's own constructors, of a tag over a value of another kind and of numbers that are none.
        raise ValueError(f"a value does not fit its tag ({first_line(error)}): remove the tag") from None
    finally:
        loader.dispose()


class _UniqueKeys(yaml.SafeLoader):
    """YAML whose second value for a key does not silently replace the first; `<<` may be overridden, as it is for."""

    num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.num_nodes += 1
        if self.num_nodes > _MAX_VALUES:  # before the rest of a long file is read
            raise _too_many()
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != _MERGE]
        if len({id(key) for key in own}) == len(own):  # not merged yet
            keys = [self.construct_object(key, deep=True) for key in own]
            second = next((index for index, key in enumerate(keys) if key in keys[:index]), None)
            if second is not None:
                problem = f"the key {keys[second]} stands there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, own[second].start_mark)
        return super().construct_mapping(node, deep)


def _measure(node: yaml.Node, counted: dict[int, int], depth: int) -> int:
    """Values below a node, with what aliases stand for. Raises ValueError beyond the bounds, also for a circle."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} deep, or an alias that holds itself: write it flat")
    if id(node) in counted:
        return counted[id(node)]
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    count = 1 + sum(_measure(child, counted, depth + 1) for child in children)
    if count > _MAX_VALUES:
        raise _too_many()
    counted[id(node)] = count
    return count


def _too_many() -> ValueError:
    return ValueError(f"more than {_MAX_VALUES} values: settings have fewer")


def why_not_yaml(error: Exception) -> str:
    """Put what `parse_yaml` has raised into words, with the place where it is known; the file is named elsewhere."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, yaml.reader.ReaderError):  # of a text, its `character` is a number
        return f"character {int(error.character):#x} at position {error.position}: {error.reason}"
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        return place + ", ".join(part for part in (error.problem, error.context) if part)
    return " ".join(str(error).split())
