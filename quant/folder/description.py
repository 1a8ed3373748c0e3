"""`quant_model_description.json`: which scheme every tensor of a quantized folder follows, read and checked.

The file is msmodelslim's: a flat object of run-wide keys (`model_quant_type`, `version`, `group_size`, `metadata`,
`optional`) and one entry per tensor name with its scheme. vllm-ascend decides by the `.weight` entries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from quant.errors import QuantizationError
from quant.folder.tensors import check_name, read_json, shown
from quant.layout import DESCRIPTION_FILE, description_files

FLOAT = "FLOAT"
Scheme = Literal["W8A8", "W8A8_DYNAMIC"]
SCHEMES: tuple[str, ...] = get_args(Scheme)
# msmodelslim's PDMIX, static for prompts and dynamic for tokens: what it has of the second kind is W8A8_DYNAMIC.
MIX = "W8A8_MIX"
_READ = (*SCHEMES, MIX)

_SCHEME_FIX = "quantize the float model again as W8A8 or W8A8_DYNAMIC"


@dataclass(frozen=True, slots=True)
class Description:
    path: Path
    scheme_of: Mapping[str, str]  # tensor name -> FLOAT, W8A8, W8A8_DYNAMIC or W8A8_MIX


def read_description(folder: str | Path) -> Description:
    """Read and check the file. Raises QuantizationError naming file and key for bad JSON, unknown schemes and rotated
    activations."""
    folder = Path(folder)
    found = description_files(folder)
    if not found:
        raise QuantizationError(f"{folder}: no {DESCRIPTION_FILE}; the folder is not quantized")
    if len(found) > 1:
        raise QuantizationError(f"{folder}: holds {found[0].name} and {found[1].name}; remove the one that is old")
    path = found[0]
    tree = read_json(path)
    _check_whole_model(tree, path)
    entries = {name: value for name, value in tree.items() if "." in name}
    for name, value in entries.items():
        check_name(path, name)
        if value != FLOAT and value not in _READ:
            raise QuantizationError(f"{path}: {name}: scheme {shown(value)} is not supported; {_SCHEME_FIX}")
    if not entries:
        raise QuantizationError(f"{path}: names no tensor; copy the file again")
    return Description(path, entries)


def write_description(folder: Path, scheme_of: Mapping[str, str], model_quant_type: Scheme) -> None:
    tree: dict[str, Any] = {
        "model_quant_type": model_quant_type,
        "version": "1.0.0",
        "group_size": 0,
        "metadata": {},
        "optional": {},
    }
    text = json.dumps({**tree, **scheme_of}, indent=2)
    (folder / DESCRIPTION_FILE).write_text(text, encoding="utf-8")


def _check_whole_model(tree: Mapping[str, Any], path: Path) -> None:
    kind = tree.get("model_quant_type", "W8A8")
    if kind not in _READ:
        raise QuantizationError(f"{path}: model_quant_type: scheme {shown(kind)} is not supported; {_SCHEME_FIX}")
    metadata = tree.get("metadata")
    if isinstance(metadata, dict) and "quarot" in metadata:
        raise QuantizationError(f"{path}: metadata.quarot: rotated activations are not supported; {_SCHEME_FIX}")
