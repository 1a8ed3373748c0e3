"""Checkpoints whose weights are stored quantized by other tools, refused before a tensor is looked for.

Folders of `lopa quantize` and msmodelslim have a description instead, which `quant.folder` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.folder import shown
from common.errors import ConfigError
from quant.layout import is_quantized_folder

UNQUANTIZED = "use the unquantized checkpoint, of which `lopa quantize` makes an 8-bit one"
_KEYS = ("quantization_config", "compression_config")
_DESCRIBED = ("ascend", "msmodelslim")  # by a file of its own
_BITSANDBYTES = ("load_in_8bit", "load_in_4bit", "_load_in_8bit", "_load_in_4bit")


def check_unquantized(path: Path, tree: Mapping[str, Any]) -> None:
    """`tree`: what the config.json at `path` holds. Raises ConfigError with the method that it names."""
    for key in _KEYS:
        if not tree.get(key):
            continue
        method = _method(tree[key])
        if method not in _DESCRIBED:
            raise ConfigError(f"{path}: {key}: {method}: weights quantized by this method are not read; {UNQUANTIZED}")
        if not is_quantized_folder(path.parent):
            raise ConfigError(
                f"{path}: {key}: {method}: no quant_model_description.json is beside it; download the folder again"
            )


def _method(settings: Any) -> str:
    if not isinstance(settings, Mapping):
        return shown(settings)
    if any(settings.get(key) is True for key in _BITSANDBYTES):
        return "bitsandbytes"
    method = settings.get("quant_method") or settings.get("quant_algo") or settings.get("format")
    return method if isinstance(method, str) and method.isidentifier() else shown(method or settings)
