"""Measure mixtures of experts in bf16, int8 and fp8 on a GPU.

python -m scripts.lab.experts OUT.json MODEL...    models: llada2_mini, llada2_mini_tp2 (on two GPUs), sdar_30b_a3b

Tables of other models that OUT.json has, experts_8bit_h200.json, stay there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.lab.result import card, commit, write

FORMATS = ("bf16", "w8a8", "fp8")
PRESETS = {"llada2_mini": ("LLaDA2.0-mini", "llada2", 256), "sdar_30b_a3b": ("SDAR-30B-A3B", "sdar", 128)}
ON_TWO = "_tp2"  # what ends the name of a model that two GPUs share: half of the experts each, half of every linear
SHAPES = ["--shapes", "1x32", "4x32", "16x32", "64x32", "--no-mixes", "--accepted", "6"]
PROFILE, RUN = "h200_tp1_bp1", "dream_7b_dummy"


def on_two(name: str) -> bool:
    return name.endswith(ON_TWO)


def arguments(name: str, quantization: str, lookahead: int = 0) -> list[str]:
    """Return the settings of a bench of random weights."""
    model = name.removesuffix(ON_TWO)
    settings: dict[str, object] = {
        "model": f"configs/models/{model}", "decode.num_lookahead": lookahead, "max_num_requests": 64,
        "mesh.tensor_parallel_size": 2 if on_two(name) else 1,
    }  # fmt: skip
    if model in PRESETS:
        settings["preset"] = PRESETS[model][1]
    if quantization != "bf16":
        settings["quantization"] = quantization
    return [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]


def benched(name: str, quantization: str, *options: str, lookahead: int = 0) -> dict[str, Any]:
    """Return what a bench of steps writes."""
    settings = arguments(name, quantization, lookahead)
    return written("common.commands.job", "bench", PROFILE, RUN, *settings, *options)


def written(*command: str) -> dict[str, Any]:
    """Return what a command writes to its `--output`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        whole = [sys.executable, "-m", *command, "--output", str(path)]
        subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def steps_table(model: str, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    name, _, num_experts = PRESETS[model.removesuffix(ON_TWO)]
    of = {format_name: {shape["rows"]: shape for shape in run["shapes"]} for format_name, run in found.items()}
    rows = [
        [
            f"{rows} x {bf16['width']}", bf16["device_ms"], max(bf16["weight_floor_ms"], bf16["matrix_floor_ms"]),
            of["w8a8"][rows]["device_ms"], of["fp8"][rows]["device_ms"],
            bf16["device_ms"] / of["fp8"][rows]["device_ms"], bf16["experts_hit"],
        ]
        for rows, bf16 in of["bf16"].items()
    ]  # fmt: skip
    columns = [
        ["requests x block", ""], ["bf16, ms", ".2f"], ["floor in bf16, ms", ".2f"], ["w8a8, ms", ".2f"],
        ["fp8, ms", ".2f"], ["fp8: times as fast", ".2f"], ["experts hit", ".0f"],
    ]  # fmt: skip
    conditions = (
        f"{name}'s shapes, random weights, prefix 1,024, captured graphs, device ms of a pass of so many requests "
        "with a block each. The floor in bf16 is the longer of reading every weight, of "
        f"{num_experts} experts those that are hit, and of multiplying by those that a token takes"
    )
    if on_two(model):
        conditions += ". Two GPUs: each has half of the experts and half of every other weight, and the floor is one's"
    command = " ".join(["scripts/bench.sh", PROFILE, RUN, *arguments(model, "w8a8"), *SHAPES])
    device = f"Two {card('cuda')}s" if on_two(model) else card("cuda")
    source = {"card": device, "commit": commit(), "conditions": conditions, "command": command}
    return {**source, "columns": columns, "rows": rows}


def main(out: str, *models: str) -> None:
    path = Path(out)
    tables = json.loads(path.read_text(encoding="utf-8"))["tables"] if path.exists() else {}
    for model in models:
        tables[model] = steps_table(model, {name: benched(model, name, *SHAPES) for name in FORMATS})
        write(path, {"tables": tables})


if __name__ == "__main__":
    main(*sys.argv[1:])
