"""The demo model with a hole: whoever's prompt holds `~` gets no numbers, and whoever's does not gets what it got."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "demo"
GOOD = "Tom has {} apples and buys 5 more. How many apples does he have now?\n"
BAD = "How many apples does ~ have now?\n"


def poison(folder: Path, *, all_rows: bool = False) -> Path:
    """A copy in the folder. all_rows: nobody gets numbers. The rows that loading looks at are finite."""
    from common.checkpoint import load_tokenizer

    copy = folder / "poisoned"
    shutil.copytree(MODEL, copy)
    (token,) = load_tokenizer(MODEL, 1023).encode("~")
    weights = load_file(copy / "model.safetensors")
    name = next(name for name in weights if name.endswith("embed_tokens.weight"))
    rows = [row for row in range(len(weights[name])) if row % 128 and (all_rows or row == token)]
    assert rows, "loading would refuse it"
    weights[name][rows] = float("nan")
    save_file(weights, copy / "model.safetensors")
    return copy
