"""Put measurements of several meshes into one result file: steps by shape, and whole decodes of one request.

python -m scripts.lab.meshes OUTPUT.json COMMIT NAME=FILE.json [NAME=FILE.json ...]

FILE is what `lopa bench steps --accepted 10 15 --output FILE` writes. NAME stands in the tables' first column; `k = 7`
and `fp8` in it are part of the name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scripts.lab.result import write

SHAPES = ((1, 32), (1, 64), (1, 96), (1, 128), (1, 192), (1, 256), (4, 64), (8, 64))


def steps(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the table of a pass by shape. Shapes that were not run are dashes, meshes with few of them left out."""
    rows = []
    for name, result in found.items():
        if len(result["shapes"]) < len(SHAPES) / 2:
            continue
        by_shape = {(shape["rows"], shape["width"]): shape["device_ms"] for shape in result["shapes"]}
        floor = next(shape["weight_floor_ms"] for shape in result["shapes"])
        rows.append([name, floor, *(by_shape.get(shape) for shape in SHAPES)])
    columns = [["mesh", ""], ["read once", ".2f"], *([f"{rows} x {width}", ".2f"] for rows, width in SHAPES)]
    return {"columns": columns, "rows": rows}


def decodes(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the table of one request's tokens/s."""
    rows = []
    for name, result in found.items():
        few, many = result["steps"]
        outside_us = 1e3 * few["by_width"]["64"]["outside_device"]
        step_ms = few["by_width"]["64"]["step"]
        rows.append(
            [name, few["first_step_ms"], step_ms, outside_us, few["tps"], many["tps"], many["tps_without_first_step"]]
        )
    tokens = [f"{section['tpf']:.1f}" for section in next(iter(found.values()))["steps"]]
    columns = [["mesh", ""], ["first step, ms", ".1f"], ["step, ms", ".2f"], ["outside the device, us", ".0f"]]
    columns += [[f"tokens/s, TPF {tpf}", ",.0f"] for tpf in tokens] + [["without the first step", ",.0f"]]
    return {"columns": columns, "rows": rows}


def main(output: str, commit: str, *named: str) -> None:
    """Raises SystemExit where the measurements are of different cards."""
    files = dict(name.rsplit("=", 1) for name in named)
    found = {name: json.loads(Path(path).read_text(encoding="utf-8")) for name, path in files.items()}
    cards = {result["conditions"]["device"] for result in found.values()}
    if len(cards) != 1:
        raise SystemExit(f"measurements of different cards: {', '.join(sorted(cards))}")
    shared = {"card": f"{cards.pop()}s of one host", "commit": commit}
    shapes = "Dream-7B's shapes in bf16 or fp8 with its head, random weights, prefix 1,024, captured graphs"
    result = {
        "tables": {
            "steps": {
                **shared,
                "conditions": f"{shapes}. Device ms of a pass with so many rows for each rank of bp, medians of 40. "
                "Read once: the weights of a rank in bf16 at the copy bandwidth of the same run",
                **steps(found),
            },
            "decodes": {
                **shared,
                "conditions": f"{shapes}, k = 3 unless it says otherwise. One request of 256 tokens, the pass of its "
                "prompt included. Step: medians at a window of 64 without a commit",
                **decodes(found),
            },
        }
    }
    write(Path(output), result)


if __name__ == "__main__":
    main(*sys.argv[1:])
