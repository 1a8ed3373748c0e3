"""What a name on the command line means: a file, one that comes with the package, a model's folder, or a hub's
repository."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from common.errors import NO_SUCH_FILE, ConfigError, did_you_mean, why_no_file
from common.hub import HubName, fetch, is_hub_name, scheme_hint
from common.user_files import is_file

Kind = Literal["profiles", "runs", "sweeps", "presets"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
# The folder beside `common`: in a checkout, and in an installed package.
_ROOT = Path(__file__).resolve().parents[2]
_CONFIGS = _ROOT / "configs"
_MAX_BYTES = 2**20
# By model_type, else by architecture. A family that is not here is decoded as a run file that says nothing.
_PRESET_OF = {
    "llada": "llada_fast",
    "LLaDAModelLM": "llada_fast",
    "sdar": "sdar",
    "SDARForCausalLM": "sdar",
    "sdar_moe": "sdar",
    "SDARMoeForCausalLM": "sdar",
    "Fast_dLLM_Qwen": "fast_dllm_v2",
    "Fast_dLLM_QwenForCausalLM": "fast_dllm_v2",
    "llada2_moe": "llada2",
    "LLaDA2MoeModelLM": "llada2",
    "StableDiffcoderForCausalLM": "stable_diffcoder",
}
# A family whose checkpoints are decoded in several ways has a preset by a key that only some of them have.
_PRESET_BY_KEY = {"llada2": {"split_token_id": "llada2_2"}}
_FEW_POSITIONS = 2048
_BLOCK_SIZE_KEYS = ("block_size", "bd_size")
_SHIPPED = ("configs", "models")


def find_config(kind: Kind, name: str | Path) -> Path:
    """A path as it is; the bare name of a file in configs/`kind` as its path; among runs a model's folder as it is, and
    a hub's name as the folder of its settings.

    Raises ConfigError naming those there.
    """
    if kind == "runs" and is_hub_name(str(name)):
        return fetch(str(name), with_weights=False)
    folder = _CONFIGS / kind
    candidates = (Path(name), folder / name, folder / f"{name}.yaml")
    found = next((path for path in candidates if is_file(path)), None)
    if found is None and kind == "runs":
        found = _model_folder(str(name))
    if found is None:
        known = shipped_names(kind)
        other = next((other for other in _KINDS if str(name) in shipped_names(other)), None)
        hint = f"it is one of the {other}; " if other else did_you_mean(Path(name).stem, known)
        of_hub = scheme_hint(str(name)) if kind == "runs" else None
        why = why_no_file(Path(name))
        if kind == "runs" and why == NO_SUCH_FILE:
            why += " or folder"
        raise ConfigError(
            f"{name}: {why}, and not one of the {kind} in {folder} ({hint}{', '.join(known)})"
            f"{'' if of_hub is None else f'; {of_hub}'}"
        )
    return found


def shipped_names(kind: Kind) -> list[str]:
    """The names in configs/`kind`, sorted."""
    return sorted(path.stem for path in (_CONFIGS / kind).glob("*.yaml"))


def or_shipped(path: str) -> str:
    """`models/demo` and `configs/models/dream_7b` also where the command is started outside of a checkout."""
    shipped = _ROOT / path
    is_shipped = Path(path).parts[:1] in [(name,) for name in _SHIPPED] and ".." not in Path(path).parts
    return str(shipped) if is_shipped and _exists(shipped) and not _exists(Path(path)) else path


def folder_of(name: str, *, with_weights: bool = True) -> str:
    """The folder of a model, a tokenizer or a LoRA: a repository of a hub fetched, a path as `or_shipped` takes it.

    Raises ConfigError.
    """
    return str(fetch(name, with_weights=with_weights)) if is_hub_name(name) else or_shipped(name)


def short_name(model: str) -> str:
    """What files made for MODEL are called after: a file or a folder without its ending, a repository without owner."""
    return HubName.parse(model).repository.rpartition("/")[2] if is_hub_name(model) else Path(model).stem


def fewshot_file(name: str) -> Path:
    """A file of configs/fewshot: solved rows of a benchmark."""
    return _CONFIGS / "fewshot" / name


def tiles_folder() -> Path:
    """configs/tiles: the tiles of linears that come with the package, a file a device."""
    return _CONFIGS / "tiles"


def machine_file(name: str) -> Path:
    """configs/machines: the measured numbers that an engine decides by, a file a device."""
    return _CONFIGS / "machines" / f"{name}.yaml"


def _model_folder(name: str) -> Path | None:
    """The folder of a model, if it is one. Raises ConfigError for another folder."""
    if not name:
        raise ConfigError("the model's name is empty: give a folder, a run file, or a name of configs/runs")
    path = Path(or_shipped(name))
    if not _exists(path) or not path.is_dir():
        return None
    if not any(is_file(path / file) for file in ("config.json", "adapter_config.json")):
        inner = min((file.parent.name for file in path.glob("*/config.json")), default="")
        own = f"one of its folders, such as {inner}" if inner else "the model's own folder"
        raise ConfigError(f"{name}: a folder without a config.json, so not of a model: give {own}")
    return path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def settings_of(folder: Path) -> dict[str, Any]:
    """The folder of a model as a run of nothing else, with the preset and sizes that its config.json asks for.

    Of a config.json that cannot be read only the folder: loading says why.
    """
    tree: dict[str, Any] = {"model": str(folder)}
    fields = _fields(folder / "config.json")
    architectures = fields.get("architectures")
    names = [fields.get("model_type"), *(architectures if isinstance(architectures, list) else [])]
    preset = next((_PRESET_OF[name] for name in names if isinstance(name, str) and name in _PRESET_OF), None)
    if preset is not None:
        own = _PRESET_BY_KEY.get(preset, {})
        tree["preset"] = next((found for key, found in own.items() if fields.get(key) is not None), preset)
        tree["decode"] = dict(_sizes(fields))
    return tree


def _sizes(fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """What the checkpoint says of sizes that the preset says of its family."""
    block = next((fields[key] for key in _BLOCK_SIZE_KEYS if isinstance(fields.get(key), int)), None)
    if block is not None:
        yield "block_size", block
    positions = fields.get("max_position_embeddings")
    if isinstance(positions, int) and positions < _FEW_POSITIONS:  # the preset's answers would leave a prompt no room
        yield "max_new_tokens", max(1, positions // 2)


def _fields(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return {}
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
