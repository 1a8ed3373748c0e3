"""How a quantized folder is told from a float one, by the name of a file alone: nothing here loads torch."""

from __future__ import annotations

from pathlib import Path

DESCRIPTION_FILE = "quant_model_description.json"


def is_quantized_folder(folder: str | Path) -> bool:
    """Whether the folder says that it is quantized; reading its description may still fail."""
    return bool(description_files(Path(folder)))


def description_files(folder: Path) -> list[Path]:
    """The files that say which scheme each tensor follows: one in a folder that is in order, none in a float one."""
    # Older tools add the scheme to the name, e.g. quant_model_description_w8a8.json.
    exact = folder / DESCRIPTION_FILE
    return [exact] if exact.is_file() else sorted(folder.glob("quant_model_description_*.json"))
