"""Read a YAML file and `--set key=value` into a checked object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from common.config.decode import DecodeConfig
from common.config.explain import REFUSED_KEYS, error_to_begin_with, keys_of, problem
from common.config.frozen import Frozen
from common.config.names import find_config, folder_of, or_shipped, settings_of
from common.config.old_spellings import is_old_of_profile, why_old
from common.config.overrides import Origins, Override, apply_override, as_overrides
from common.config.profile import DeviceProfile
from common.config.run import RunConfig
from common.config.strategies import merged_decode
from common.config.yaml_file import read_yaml
from common.errors import ConfigError, placed
from common.hub import is_hub_name

ConfigT = TypeVar("ConfigT", bound=Frozen)


def load_profile_and_run(
    profile: str | Path, run: str | Path, overrides: Sequence[str | Override] = (), *, with_weights: bool = True
) -> tuple[DeviceProfile, RunConfig]:
    """Load both files of a run, as `load_run` does. An override goes to the file that its first key belongs to. Raises
    ConfigError."""
    given = as_overrides(overrides)
    of_profile = [
        override
        for override in given
        if override.keys[0] in DeviceProfile.model_fields or is_old_of_profile(override.keys[0])
    ]
    of_run = [override for override in given if override not in of_profile]
    return load_profile(profile, of_profile), load_run(run, of_run, with_weights=with_weights)


def load_profile(name: str | Path, overrides: Sequence[str | Override] = ()) -> DeviceProfile:
    """Read a device profile: a YAML file, or a name from configs/profiles. Raises ConfigError naming key and fix."""
    return load_yaml(find_config("profiles", name), DeviceProfile, overrides)


def load_run(name: str | Path, overrides: Sequence[str | Override] = (), *, with_weights: bool = True) -> RunConfig:
    """Read a run file, or take a model as a run by its family's preset, and apply `key=value` overrides (dotted keys,
    YAML values). Relative paths that are not here are those of files that come with the package; repositories of a hub
    become folders of its cache.

    name: a YAML file, a name from configs/runs, a model's folder, or a hub's name. with_weights: fetch a repository's
    weights too. Raises ConfigError.
    """
    path = find_config("runs", name)
    tree = settings_of(path) if path.is_dir() else read_yaml(path)
    if is_hub_name(str(name)):
        tree["model"] = str(name)
    run = _checked(tree, Origins(path, as_overrides(overrides)), RunConfig)
    source = run.input and run.input.model_copy(update={"path": or_shipped(run.input.path)})
    folders: dict[str, Any] = {
        "model": folder_of(run.model, with_weights=with_weights and run.load_format == "auto"),
        "tokenizer": run.tokenizer and folder_of(run.tokenizer, with_weights=False),
        "lora_path": run.lora_path and folder_of(run.lora_path, with_weights=with_weights),
    }
    return run.model_copy(update={**folders, "input": source})


def as_yaml(settings: DeviceProfile | RunConfig) -> str:
    """Return the file that says all of these settings, those of a preset too."""
    content = settings.model_dump(mode="json", exclude_defaults=True, exclude={"preset"})
    if isinstance(settings, RunConfig):
        # What was said though it is usual: of another strategy, or of a server, something else may be.
        said = settings.model_dump(mode="json", exclude_unset=True, include={"decode", "max_num_requests"})
        decode = said.pop("decode", {}) | content.get("decode", {})
        content |= said | ({"decode": decode} if decode else {})
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def load_yaml(path: str | Path, kind: type[ConfigT], overrides: Sequence[str | Override] = ()) -> ConfigT:
    """Any file of settings as its checked object. Raises ConfigError."""
    return _checked(read_yaml(Path(path)), Origins(Path(path), as_overrides(overrides)), kind)


def _checked(tree: dict[str, Any], origins: Origins, kind: type[ConfigT]) -> ConfigT:
    """The tree with the overrides in it. Raises ConfigError."""
    for override in origins.overrides:
        apply_override(tree, override, kind)
    _refuse_keys(tree, origins)
    if kind is RunConfig and tree.get("preset") is not None:
        _take_preset(tree, origins)
    _refuse_broken_text(tree, origins)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        # What is wrong with all of `decode` is how its settings fit each other, some of which the preset may have.
        is_of_preset = tree.get("preset") and error.errors()[0]["loc"] == ("decode",)
        preset = f" (decode has the settings of preset {tree['preset']} too)" if is_of_preset else ""
        origin = origins.of(keys_of(error_to_begin_with(error)["loc"]))
        raise ConfigError(f"{origin}: {problem(error, kind)}{preset}") from None


def _take_preset(tree: dict[str, Any], origins: Origins) -> None:
    """Put the preset's `decode` under the run's own."""
    origin = origins.of(["preset"])
    name, own = tree["preset"], tree.get("decode") or {}
    if not isinstance(name, str) or not isinstance(own, dict):
        raise ConfigError(f"{origin}: preset: give the name of a file in configs/presets, and settings under decode")
    with placed(f"{origin}: preset"):
        preset = find_config("presets", name)
    tree["decode"] = merged_decode(_preset_settings(preset), own)


def _preset_settings(path: Path) -> dict[str, Any]:
    """Raises ConfigError naming the preset, not the run, for what no run's settings could make right."""
    preset = read_yaml(path)
    settings = preset.pop("decode", None)
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a mapping called decode, the settings of a family")
    if preset:
        raise ConfigError(f"{path}: {next(iter(preset))}: a preset has decode only; write this in the run file")
    _refuse_keys(settings, Origins(path))
    old = why_old(settings)
    if old is not None:
        raise ConfigError(f"{path}: decode: {old}")
    try:
        DecodeConfig.model_validate(settings)
    except ValidationError as error:
        if error.errors()[0]["loc"]:  # else settings that contradict each other, which the run's may amend
            raise ConfigError(f"{path}: {problem(error, DecodeConfig, 'decode')}") from None
    return settings


def _refuse_broken_text(node: Any, origins: Origins, location: tuple[str, ...] = ()) -> None:
    """Half a surrogate pair, which no file and no variable can hold."""
    if isinstance(node, str):
        if any("\ud800" <= letter <= "\udfff" for letter in node):
            where = f"{origins.of(location)}: {'.'.join(location) or 'a key'}"
            raise ConfigError(f"{where}: {node!a:.100} holds half a surrogate pair, which is no text: correct it")
    elif isinstance(node, Mapping):
        for name, value in node.items():
            _refuse_broken_text(name, origins, location)
            _refuse_broken_text(value, origins, (*location, str(name)))
    elif isinstance(node, (list, tuple)):
        for value in node:
            _refuse_broken_text(value, origins, location)


def _refuse_keys(tree: Mapping[str, Any], origins: Origins, section: tuple[str, ...] = ()) -> None:
    for key, value in tree.items():
        location = (*section, str(key))
        if key in REFUSED_KEYS:
            raise ConfigError(f"{origins.of(location)}: {'.'.join(location)}: {REFUSED_KEYS[key]}")
        if isinstance(value, Mapping):
            _refuse_keys(value, origins, location)
