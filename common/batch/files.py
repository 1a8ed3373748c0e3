"""The files of a run: where requests come from, where results go, and what a run is known by."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from common.batch.inputs import digest_prefix
from common.batch.sidecar import decode_identity, recorded_identity, sidecar_path
from common.config import DeviceProfile, InputConfig, OutputConfig, RunConfig
from common.errors import ConfigError


def input_and_output(run: RunConfig) -> tuple[InputConfig, OutputConfig]:
    """Where requests come from and results go. Raises ConfigError if one is missing or would destroy the other."""
    if run.input is None:
        raise ConfigError("the run file has no input section: add input.path, a JSONL file with one request a line")
    if run.output is None:
        raise ConfigError("the run file has no output section: add output.path, the JSONL file for the results")
    target = Path(run.output.path)
    _require_file("output.path", target)
    _require_file("output.metrics_path", metrics_path(run.output))
    paths = [Path(run.input.path), target, metrics_path(run.output), sidecar_path(target)]
    if any(_is_same_file(one, other) for one, other in itertools.combinations(paths, 2)):
        raise ConfigError(
            "input.path, output.path, output.metrics_path and the .run.json beside output.path must be different files"
        )
    return run.input, run.output


def _require_file(setting: str, path: Path) -> None:
    """ConfigError unless this is, or can become, a file."""
    folder = next((parent for parent in path.absolute().parents if parent.exists()), Path("/"))
    if path.is_dir():
        raise ConfigError(f"{setting} {path} is a folder: name a file in it")
    if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{setting} {path} cannot be written: choose a place that is writable")


def _is_same_file(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


def metrics_path(output: OutputConfig) -> Path:
    return Path(output.metrics_path) if output.metrics_path else Path(output.path).with_suffix(".metrics.json")


def identity(profile: DeviceProfile, run: RunConfig) -> dict[str, Any]:
    """What the results depend on. Mesh and batch size are not in it: they change the speed, not the tokens."""
    source, target = input_and_output(run)
    before = recorded_identity(Path(target.path)) or {}
    # Only what was there at the first start is compared: lines may be added to the input between two starts.
    num_bytes = before.get("input_bytes")
    length, digest = digest_prefix(Path(source.path), num_bytes if isinstance(num_bytes, int) else None)
    return {
        "model": run.model,
        "lora_path": run.lora_path,
        "load_format": run.load_format,
        "seed": run.seed,
        **decode_identity(run.decode),
        "input.prompt_template": source.prompt_template,
        "input.add_bos_token": source.add_bos_token,
        "input_bytes": length,
        "input_sha256": digest,
        "dtype": profile.dtype,
        "quantization": profile.quantization,
    }
