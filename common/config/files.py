"""From a YAML file and `--set key=value` to the checked object; where files that come with the package lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from common.config.decode import DecodeConfig
from common.config.explain import REFUSED_KEYS, keys_of, problem
from common.config.frozen import Frozen
from common.config.old_spellings import is_old_of_profile, why_old
from common.config.overrides import Origins, Override, apply_override, as_overrides
from common.config.profile import DeviceProfile
from common.config.run import RunConfig
from common.config.strategies import merged_decode
from common.config.yaml_file import read_yaml
from common.errors import ConfigError, why_no_file

# The folder beside `common`: in a checkout, and in an installed package.
_ROOT = Path(__file__).resolve().parents[2]
_CONFIGS = _ROOT / "configs"

ConfigT = TypeVar("ConfigT", bound=Frozen)


def find_config(kind: Literal["profiles", "runs", "sweeps", "presets"], name: str | Path) -> Path:
    """A path as it is; the bare name of a file in configs/`kind` as its path. Raises ConfigError naming those there."""
    folder = _CONFIGS / kind
    candidates = (Path(name), folder / name, folder / f"{name}.yaml")
    found = next((path for path in candidates if _is_file(path)), None)
    if found is None:
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) or "none"
        raise ConfigError(f"{name}: {why_no_file(Path(name))}, and not one of the {kind} in {folder} ({known})")
    return found


def fewshot_file(name: str) -> Path:
    """A file of configs/fewshot: solved rows of a benchmark."""
    return _CONFIGS / "fewshot" / name


def tiles_folder() -> Path:
    """configs/tiles: the tiles of linears that come with the package, a file a device."""
    return _CONFIGS / "tiles"


def machine_file(name: str) -> Path:
    """configs/machines: the measured numbers that an engine decides by, a file a device."""
    return _CONFIGS / "machines" / f"{name}.yaml"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def load_profile_and_run(
    profile: str | Path, run: str | Path, overrides: Sequence[str | Override] = ()
) -> tuple[DeviceProfile, RunConfig]:
    """Both files of a run. An override goes to the file that its first key belongs to. Raises ConfigError."""
    given = as_overrides(overrides)
    of_profile = [
        override
        for override in given
        if override.keys[0] in DeviceProfile.model_fields or is_old_of_profile(override.keys[0])
    ]
    of_run = [override for override in given if override not in of_profile]
    return load_profile(profile, of_profile), load_run(run, of_run)


def load_profile(path: str | Path, overrides: Sequence[str | Override] = ()) -> DeviceProfile:
    """Read a device profile. Raises ConfigError naming file or override, key and fix."""
    return load_yaml(path, DeviceProfile, overrides)


def load_run(path: str | Path, overrides: Sequence[str | Override] = ()) -> RunConfig:
    """Read a run file and apply `key=value` overrides (dotted keys, YAML values). Raises ConfigError."""
    run = load_yaml(path, RunConfig, overrides)
    return run.model_copy(update={"model": _or_shipped(run.model)})


def _or_shipped(folder: str) -> str:
    """`configs/models/dream_7b` of a shipped run also where the command is started outside of a checkout."""
    shipped = _ROOT / folder
    is_shipped = shipped.is_relative_to(_CONFIGS) and shipped.is_dir() and not Path(folder).exists()
    return str(shipped) if is_shipped else folder


def load_yaml(path: str | Path, kind: type[ConfigT], overrides: Sequence[str | Override] = ()) -> ConfigT:
    """Any file of settings as its checked object. Raises ConfigError."""
    tree, origins = read_yaml(Path(path)), Origins(Path(path), as_overrides(overrides))
    for override in origins.overrides:
        apply_override(tree, override, kind)
    _refuse_keys(tree, origins)
    if kind is RunConfig and tree.get("preset") is not None:
        _take_preset(tree, origins)
    _refuse_broken_text(tree, origins)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        preset = f" (decode has the settings of preset {tree['preset']} too)" if _is_of_preset(tree, error) else ""
        origin = origins.of(keys_of(error.errors()[0]["loc"]))
        raise ConfigError(f"{origin}: {problem(error, kind)}{preset}") from None


def _is_of_preset(tree: Mapping[str, Any], error: ValidationError) -> bool:
    """Whether what is wrong is how settings of `decode` fit each other, some of which the preset may have."""
    return bool(tree.get("preset")) and error.errors()[0]["loc"] == ("decode",)


def _take_preset(tree: dict[str, Any], origins: Origins) -> None:
    """Put the preset's `decode` under the run's own."""
    origin = origins.of(["preset"])
    name, own = tree["preset"], tree.get("decode") or {}
    if not isinstance(name, str) or not isinstance(own, dict):
        raise ConfigError(f"{origin}: preset: give the name of a file in configs/presets, and settings under decode")
    try:
        preset = find_config("presets", name)
    except ConfigError as error:
        raise ConfigError(f"{origin}: preset: {error}") from None
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
