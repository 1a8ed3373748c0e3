"""What a run is known by: everything that its records depend on, and whether two runs are one.

Mesh and batch size are not in it: they change the speed, not the tokens. Paths are compared by where they lead,
repositories of a hub by their names whatever cache they lie in, and the model and the LoRA by what their folders hold.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.batch.files import real_file, sidecar_path
from common.batch.inputs import Input
from common.batch.model_files import digests, last_change
from common.batch.sidecar import recorded_identity
from common.config import DecodeConfig, DeviceProfile, InputConfig, RunConfig, recorded
from common.errors import ConfigError
from common.hub import name_of
from common.scoring import task_of

logger = logging.getLogger(__name__)
FIX = "choose another output.path, or pass --overwrite to start anew"
_DECODE = "decode."
_FOLDERS = {"model": "the model", "lora_path": "the LoRA", "tokenizer": "the tokenizer"}
_PLACE, _FILES, _CHANGED = "{}.real_path", "{}.files", "{}.last_change"


def identity(profile: DeviceProfile, run: RunConfig, found: Input) -> dict[str, Any]:
    """Return what the records depend on. Raises ConfigError for a model folder that cannot be read."""
    assert run.input is not None, "input_and_output has checked it"
    return {
        **_folder("model", run.model, with_weights=run.load_format != "dummy"),
        **_folder("lora_path", run.lora_path, with_weights=True),
        **_folder("tokenizer", run.tokenizer, with_weights=False),
        "load_format": run.load_format,
        "seed": run.seed,
        "pace": run.pace,
        **_of_decode(run.decode.model_dump(mode="json")),
        **_input_identity(run.input),
        "input_bytes": found.num_bytes,
        "input_sha256": found.sha256,
        "dtype": profile.dtype,
        "quantization": profile.quantization,
        "output.step_map": run.output is not None and run.output.step_map,
        **({} if run.input.target_field is None else {"num_maskings": run.num_maskings}),
    }


def recorded_input_bytes(path: Path) -> int | None:
    """Return the length of the input at the first start, up to which it is compared: lines may be added to it. None:
    there are no records yet."""
    path = real_file(path)
    if not path.is_file() or not path.stat().st_size:
        return None
    num_bytes = (recorded_identity(path) or {}).get("input_bytes")
    return num_bytes if isinstance(num_bytes, int) else None


def check_identity(path: Path, identity: Mapping[str, Any]) -> None:
    """Raise ConfigError if the records depend on anything else, naming what. What an earlier version did not record is
    not compared; a decode setting that it did not know had its default."""
    recorded_before = recorded_identity(path)
    if recorded_before is None:
        raise ConfigError(f"{path} exists but {sidecar_path(path).name} does not say which run wrote it: {FIX}")
    before = {
        **_of_decode(DecodeConfig().model_dump(mode="json")), **_input_identity(InputConfig(path="-")),
        "pace": "fixed", "output.step_map": False, **_with_names_of_today(recorded_before),
    }  # fmt: skip
    wanted = json.loads(json.dumps(identity))
    changed = [_change(key, before, wanted) for key in sorted(before) if not _is_same(key, before, wanted)]
    if changed:
        raise ConfigError(f"{path} holds results of another run ({'; '.join(changed)}): {FIX}")
    for key, name in _FOLDERS.items():
        if before.get(_CHANGED.format(key), wanted[_CHANGED.format(key)]) != wanted[_CHANGED.format(key)]:
            logger.warning(
                "%s: the files of %s were written again since the first start (%s); they look the same. If they are "
                "not, start anew with --overwrite",
                path,
                name,
                wanted[key],
            )


def _folder(key: str, path: str | None, *, with_weights: bool) -> dict[str, Any]:
    folder = None if path is None else Path(path)
    of_hub = None if path is None else name_of(path)
    return {
        key: path if of_hub is None else of_hub.without_revision,
        _PLACE.format(key): str(of_hub) if of_hub is not None else None if path is None else os.path.realpath(path),
        _FILES.format(key): None if folder is None else digests(folder, with_weights=with_weights),
        _CHANGED.format(key): None if folder is None or of_hub else last_change(folder, with_weights=with_weights),
    }


def _of_decode(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {_DECODE + key: value for key, value in settings.items()}


def _with_names_of_today(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity that an earlier version may have written by its names of today."""
    decode = {key.removeprefix(_DECODE): value for key, value in identity.items() if key.startswith(_DECODE)}
    others = {key: value for key, value in identity.items() if not key.startswith(_DECODE)}
    return {**others, **_of_decode(recorded(decode))}


def _input_identity(source: InputConfig) -> dict[str, Any]:
    """What the prompts and the marks depend on beside the input's bytes."""
    names = (
        "prompt_template", "add_bos_token", "benchmark", "apply_chat_template", "settings_field", "target_field",
    )  # fmt: skip
    task = task_of(source)
    shots = None if task is None else hashlib.sha256(task.shots.encode()).hexdigest()
    return {**{f"input.{name}": getattr(source, name) for name in names}, "input.fewshot_sha256": shots}


def _is_same(key: str, before: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    if key in (template.format(folder) for folder in _FOLDERS for template in (_PLACE, _CHANGED)):
        return True  # compared with the path, and only reported
    if key in (_FILES.format(folder) for folder in _FOLDERS):
        return not _changed_files(before[key], wanted.get(key))
    return before[key] == wanted.get(key) or (key in _FOLDERS and _leads_to_one(key, before, wanted))


def _leads_to_one(key: str, before: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    if before[key] is None or wanted[key] is None:
        return False
    real_path = before.get(_PLACE.format(key)) or os.path.realpath(str(before[key]))
    return bool(real_path == wanted[_PLACE.format(key)])


def _changed_files(before: Any, now: Any) -> list[str]:
    """Return names of the files that differ; none where a folder is gone, which loading it tells."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return []
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


def _change(key: str, before: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    for folder, name in _FOLDERS.items():
        if key == _FILES.format(folder):
            return f"{name}'s content changed: {', '.join(_changed_files(before[key], wanted[key]))}"
    return f"{key} was {before[key]!r}, is {wanted.get(key)!r}"
