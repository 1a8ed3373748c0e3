"""Measure mixtures of experts in bf16, int8 and fp8 on a GPU, and set one request of LLaDA2-mini beside published
figures.

python -m scripts.lab.experts FOLDER MODEL...    models: llada2_mini, llada2_mini_tp2 (on two GPUs), sdar_30b_a3b

Reads the other models' tables from FOLDER and writes them back: experts_8bit_h200.json, records_h200.json.
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
SHAPES, ACCEPTED = ("1x32", "4x32", "16x32", "64x32"), (6, 9)
ON_TWO_GPUS = ", two GPUs"
# What is claimed, its tokens/s and TPF; our format, and tokens accepted a step.
CLAIMS: tuple[tuple[str, int, str | None, str, int], ...] = (
    ("DMax-16B, two H200s", 1338, "5.5 to 6.6", "bf16", 6),
    ("DMax-16B, two H200s", 1338, "5.5 to 6.6", "w8a8", 6),
    ("LLaDA2.1-mini, quantized, its peak", 1587, None, "w8a8", 6),
    ("LLaDA2.1-mini, quantized, its peak", 1587, None, "w8a8", 9),
)


def arguments(name: str, format_name: str) -> list[str]:
    """Return what scripts/bench.sh takes."""
    model = name.removesuffix(ON_TWO)
    settings: dict[str, object] = {
        "model": f"configs/models/{model}", "preset": PRESETS[model][1], "decode.num_lookahead": 0,
        "max_num_requests": 64, "mesh.tensor_parallel_size": 2 if name.endswith(ON_TWO) else 1,
    }  # fmt: skip
    if format_name != "bf16":
        settings["quantization"] = format_name
    given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    accepted = ["--accepted", *map(str, ACCEPTED)]
    return ["h200_tp1_bp1", "dream_7b_dummy", *given, "--shapes", *SHAPES, "--no-mixes", *accepted]


def measured(model: str, format_name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.json"
        command = [sys.executable, "-m", "common.commands.job", "bench", *arguments(model, format_name)]
        subprocess.run([*command, "--output", str(path)], check=True, stdout=subprocess.DEVNULL)
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
    if model.endswith(ON_TWO):
        conditions += ". Two GPUs: each has half of the experts and half of every other weight, and the floor is one's"
    command = " ".join(["scripts/bench.sh", *arguments(model, "w8a8")])
    device = f"Two {card('cuda')}s" if model.endswith(ON_TWO) else card("cuda")
    source = {"card": device, "commit": commit(), "conditions": conditions, "command": command}
    return {**source, "columns": columns, "rows": rows}


def records(found: dict[str, dict[str, Any]], gpus: str = "") -> dict[str, Any]:
    rows: list[list[Any]] = []
    for claim, its, its_tpf, format_name, accepted in CLAIMS:
        run = found[format_name]
        (one,) = (shape for shape in run["shapes"] if shape["rows"] == 1)
        (decode,) = (steps for steps in run["steps"] if steps["accepted"] == accepted)
        tps = 1000 * decode["tpf"] / one["call_ms"]
        rows.append([claim, its, its_tpf, format_name + gpus, decode["tpf"], tps, decode["tps"], tps / its])
    columns = [
        ["public figure", ""], ["its tokens/s", ",.0f"], ["its TPF", ""], ["ours", ""], ["our TPF", ".2f"],
        ["tokens/s, different tokens", ",.0f"], ["tokens/s, like tokens", ",.0f"], ["different / its", ".1f"],
    ]  # fmt: skip
    hit = f"{one['experts_hit']:.0f} of {PRESETS['llada2_mini'][2]}"
    conditions = (
        "Models of LLaDA2-mini's shapes, one request. A claim is its authors', on their hardware, tasks and timing. "
        "Ours: random weights, k = 0, 6 or 9 tokens accepted a step. Like tokens: a decode after a prompt of 1,024 "
        "tokens whose pass counts; mask tokens are alike with random weights and choose the same experts. "
        f"Different tokens: our TPF over one pass of 32 random tokens, which hit {hit} experts a layer. A trained "
        "model's tokens are neither"
    )
    command = "python -m scripts.lab.experts FOLDER llada2_mini"
    source = {"card": f"One {card('cuda')}", "commit": commit(), "conditions": conditions, "command": command}
    return {**source, "columns": columns, "rows": rows}


def add_records(path: Path, found: dict[str, Any]) -> None:
    """Put the rows of two GPUs in the place of those in the file."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in kept["rows"] if not row[3].endswith(ON_TWO_GPUS)] + found["rows"]
    one = kept["commit"].partition(";")[0]
    write(path, {**kept, "commit": f"{one}; on two GPUs {found['commit']}", "rows": rows})


def main(folder: str, *models: str) -> None:
    path = Path(folder) / "experts_8bit_h200.json"
    tables = json.loads(path.read_text(encoding="utf-8"))["tables"] if path.exists() else {}
    for model in models:
        found = {format_name: measured(model, format_name) for format_name in FORMATS}
        tables[model] = steps_table(model, found)
        write(path, {"tables": tables})
        if model == "llada2_mini":
            write(Path(folder) / "records_h200.json", records(found))
        elif model == "llada2_mini" + ON_TWO:
            add_records(Path(folder) / "records_h200.json", records(found, ON_TWO_GPUS))


if __name__ == "__main__":
    main(*sys.argv[1:])
