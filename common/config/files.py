"""From a YAML file and `--set key=value` to the checked object; where files that come with the package lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import ValidationError

from common.config.explain import explain, wants_text
from common.config.frozen import Frozen
from common.config.profile import DeviceProfile
from common.config.run import RunConfig
from common.config.yaml_file import parse_yaml, read_yaml
from common.errors import ConfigError

# The folder beside `common`: in a checkout, and in an installed package.
_ROOT = Path(__file__).resolve().parents[2]
_CONFIGS = _ROOT / "configs"

_REFUSED_KEYS = {
    "branching_factor": "published scripts use it for both k and k+1; set decode.num_lookahead to k, the number of "
    "lookahead branches beside the anchor",
    "trust_remote_code": "code from a checkpoint folder is never run; remove the key",
}

ConfigT = TypeVar("ConfigT", bound=Frozen)


def find_config(kind: Literal["profiles", "runs", "sweeps"], name: str | Path) -> Path:
    """A path as it is; the bare name of a file in configs/`kind` as its path. Raises ConfigError naming those there."""
    folder = _CONFIGS / kind
    candidates = (Path(name), folder / name, folder / f"{name}.yaml")
    found = next((path for path in candidates if _is_file(path)), None)
    if found is None:
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) or "none"
        raise ConfigError(f"{name}: no such file, and not one of the {kind} in {folder} ({known})")
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def load_profile_and_run(
    profile: str | Path, run: str | Path, overrides: Sequence[str] = ()
) -> tuple[DeviceProfile, RunConfig]:
    """Both files of a run. An override goes to the file that its first key belongs to. Raises ConfigError."""
    of_profile = [item for item in overrides if item.partition("=")[0].split(".")[0] in DeviceProfile.model_fields]
    of_run = [item for item in overrides if item not in of_profile]
    return load_profile(profile, of_profile), load_run(run, of_run)


def load_profile(path: str | Path, overrides: Sequence[str] = ()) -> DeviceProfile:
    """Read a device profile. Raises ConfigError naming file, key and fix."""
    return load_yaml(path, DeviceProfile, overrides)


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply `key=value` overrides (dotted keys, YAML values). Raises ConfigError."""
    run = load_yaml(path, RunConfig, overrides)
    return run.model_copy(update={"model": _or_shipped(run.model)})


def _or_shipped(folder: str) -> str:
    """`configs/models/dream_7b` of a shipped run also where the command is started outside of a checkout."""
    shipped = _ROOT / folder
    is_shipped = shipped.is_relative_to(_CONFIGS) and shipped.is_dir() and not Path(folder).exists()
    return str(shipped) if is_shipped else folder


def load_yaml(path: str | Path, kind: type[ConfigT], overrides: Sequence[str] = ()) -> ConfigT:
    """Any file of settings as its checked object. Raises ConfigError."""
    tree = read_yaml(Path(path))
    for override in overrides:
        _apply_override(tree, override, kind)
    _refuse_keys(tree, Path(path))
    _refuse_broken_text(tree, Path(path))
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, Path(path), kind)) from None


def _apply_override(tree: dict[str, Any], override: str, kind: type[Frozen]) -> None:
    key, separator, text = override.partition("=")
    *parents, leaf = key.split(".")
    if not separator or not all((*parents, leaf)):
        raise ConfigError(f"--set {override}: write key=value, for example --set decode.num_lookahead=7")
    value = _value(override, text, wants_text(kind, key.split(".")))
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {parent} is a single value, not a section")
        node = child
    node[leaf] = value


def _value(override: str, text: str, is_text: bool) -> Any:
    """YAML; but what is a text is taken as it stands, so that `-`, `{question}` and 1.0 need no quotes in quotes."""
    if not text:
        return None
    try:
        value = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = text if is_text else ...
    if value is ...:
        raise ConfigError(f"--set {override}: the value is not valid YAML; quote it")
    return text if is_text and value is not None and not isinstance(value, str) else value


def _refuse_broken_text(node: Any, path: Path, key: str = "") -> None:
    """Half a surrogate pair, which no file and no variable can hold."""
    if isinstance(node, str):
        if any("\ud800" <= letter <= "\udfff" for letter in node):
            raise ConfigError(f"{path}: {key}: {node!a:.100} holds half a surrogate pair, which is no text: correct it")
    elif isinstance(node, Mapping):
        for name, value in node.items():
            _refuse_broken_text(name, path, key or "a key")
            _refuse_broken_text(value, path, f"{key}.{name}" if key else str(name))
    elif isinstance(node, (list, tuple)):
        for value in node:
            _refuse_broken_text(value, path, key)


def _refuse_keys(tree: Mapping[str, Any], path: Path, prefix: str = "") -> None:
    for key, value in tree.items():
        if key in _REFUSED_KEYS:
            raise ConfigError(f"{path}: {prefix}{key}: {_REFUSED_KEYS[key]}")
        if isinstance(value, Mapping):
            _refuse_keys(value, path, f"{prefix}{key}.")
