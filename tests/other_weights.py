"""Folders of a model with other weights, near enough to the model's own for its texts to be texts."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

DEMO = Path(__file__).parents[1] / "models" / "demo"
_SHARE = 0.02  # of a matrix's deviation, times the number


def other_tensors(number: int, model: Path = DEMO) -> dict[str, torch.Tensor]:
    """The model's tensors with noise on its matrices, more for a larger number; 0 has none."""
    noise = torch.Generator().manual_seed(number)
    found = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if tensor.dim() > 1:
            deviation = _SHARE * number * tensor.float().std()
            tensor = (tensor.float() + deviation * torch.randn(tensor.shape, generator=noise)).to(tensor.dtype)
        found[name] = tensor.contiguous()
    return found


def write_other(folder: Path, number: int, model: Path = DEMO) -> Path:
    """A folder of them; what else the model's has is there too."""
    folder.mkdir(parents=True)
    for path in model.iterdir():
        if path.suffix not in (".safetensors", ".jsonl", ".md"):
            shutil.copyfile(path, folder / path.name)
    save_file(other_tensors(number, model), folder / "model.safetensors")
    return folder
