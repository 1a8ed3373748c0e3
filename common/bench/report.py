"""What a bench run leaves: tables in the terminal, a JSON file and Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.batch import number, real_file, write_whole
from common.errors import ConfigError, first_line
from common.processes import inform
from common.tables import markdown

Result = Mapping[str, Any]
_COMPARED = ("rows", "width", "device_ms", "call_ms")  # of a shape
_PARTS = ("schedule", "forward", "select", "commit", "advance", "device", "outside_device", "step")

_MEANING = (
    "reads: positions through the head; device: between two events around a pass, call: the host's clock around it;\n"
    "floors: ms to read every weight once, and to multiply by them; device/floor: beside the longer of the two"
)


def publish(result: Result, output: str | None) -> None:
    """Print the tables; with `output` also write the JSON, and them beside it."""
    text = tables(result)
    inform(text)
    if output is None:
        return
    path = real_file(Path(output))
    write_whole(path, json.dumps(result, indent=2) + "\n")
    write_whole(real_file(path.with_suffix(".md")), text + "\n")


def tables(result: Result) -> str:
    floors, memory = result["floors"], result["memory"]
    sections = [
        _conditions(result["conditions"]),
        f"floors: copy {_rate(floors['bytes_per_s'], 'B')}, matrix {_rate(floors['flops_per_s'], 'FLOP')} "
        f"(for half a second: {_rate(floors['sustained_flops_per_s'], 'FLOP')})",
        _shapes(result["shapes"]),
        _MEANING,
        *_length_updates(result["shapes"]),
        *([_mixes(result["mixes"])] if result["mixes"] else []),
        *[_steps(f"scripted, {section['accepted']} accepted a step", section) for section in result["steps"]],
        "memory: " + ", ".join(_held(name, value) for name, value in memory.items()),
    ]
    return "\n\n".join(sections)


def compare(before: Path, after: Path) -> str:
    """The shapes that two result files share, and how much faster the second is."""
    first, second = (_read(path) for path in (before, after))
    known = {(shape["rows"], shape["width"]): shape for shape in first["shapes"]}
    rows = []
    for shape in second["shapes"]:
        old = known.get((shape["rows"], shape["width"]))
        if old is not None:
            pairs = [(old[name], shape[name]) for name in ("device_ms", "call_ms")]
            cells = [cell for a, b in pairs for cell in (f"{a:.3f}", f"{b:.3f}", f"{a / b:.2f}x")]
            rows.append([str(shape["rows"]), str(shape["width"]), *cells])
    headings = ["rows", "window", "device ms A", "B", "A/B", "call ms A", "B", "A/B"]
    return "\n\n".join(
        [f"A: {before}", _conditions(first["conditions"]), f"B: {after}", _conditions(second["conditions"]),
         markdown(headings, rows)]
    )  # fmt: skip


def _conditions(conditions: Result) -> str:
    return ", ".join(f"{_words(name)} {_said(value)}" for name, value in conditions.items() if value is not None)


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return f"({', '.join(f'{_words(str(name))} {part}' for name, part in value.items())})"
    return f"({', '.join(map(str, value))})" if isinstance(value, (list, tuple)) else str(value)


def _held(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return f"{_words(name.removesuffix('_bytes'))} {value / 2**30:.2f} GiB"
    return f"{_words(name)} {value:.3g}"


def _words(key: str) -> str:
    """Return a key of the result file as the tables say it."""
    return key.replace("_", " ")


def _shapes(shapes: Sequence[Result]) -> str:
    headings = ["rows/rank", "window", "reads", "layers ms", "head ms", "gather ms", "device ms", "call ms",
                "weight floor", "matrix floor", "device/floor"]  # fmt: skip
    has_experts = any(shape.get("experts_hit") for shape in shapes)
    names = ("layers_ms", "head_ms", "gather_ms", "device_ms", "call_ms", "weight_floor_ms", "matrix_floor_ms")
    rows = [
        [str(shape["rows"]), str(shape["width"]), str(shape["reads"])]
        + [number(shape.get(name), 3) for name in names]
        + [f"{shape['ratio']:.2f}"]
        + ([f"{shape['experts_hit']:.0f}"] if has_experts else [])
        for shape in shapes
    ]
    return markdown([*headings, "experts hit"] if has_experts else headings, rows)


def _length_updates(shapes: Sequence[Result]) -> list[str]:
    """Return a table where an engine writes attention lengths apart, else nothing."""
    updated = [shape for shape in shapes if shape["length_updates_ms"]]
    if not updated:
        return []
    orders = list(updated[0]["length_updates_ms"])
    rows = [
        [str(shape["rows"]), str(shape["width"]), *[number(shape["length_updates_ms"][order], 3) for order in orders]]
        for shape in updated
    ]
    return ["layers alone, ms from launch to end\n\n" + markdown(["rows/rank", "window", *orders], rows)]


def _mixes(mixes: Sequence[Result]) -> str:
    rows = []
    for mix in mixes:
        widths = " ".join(map(str, mix["widths"]))
        rows.append(
            [str(mix["mean_width"]), widths, str(mix["rows"]), number(mix["device_ms"], 3), number(mix["call_ms"], 3)]
        )
    return markdown(["mean window", "windows", "rows/rank", "device ms", "call ms"], rows)


def _steps(title: str, section: Result) -> str:
    groups = {"all": section["median_ms"], "committing": section["committing_ms"], "not": section["other_ms"]}
    groups |= {f"not, window {width}": parts for width, parts in section["by_width"].items()}
    rows = [[name, *[number(parts.get(part), 3) for part in _PARTS]] for name, parts in groups.items()]
    facts = (
        f"{title}: {section['num_steps']} steps after the prompt, mean window {section['mean_width']:.0f}, "
        f"TPF {section['tpf']:.2f} ({section['effective_tpf']:.2f} up to the end of the text), "
        f"{section['tps']:.0f} tokens/s a request "
        f"({section['tps_without_first_step']:.0f} without the first step, {section['first_step_ms']:.1f} ms); "
        f"a commit costs {number(section['commit_cost_ms'], 3)} ms at the same window; median ms:"
    )
    return facts + "\n\n" + markdown(["steps", *map(_words, _PARTS)], rows)


def _rate(per_second: float, what: str) -> str:
    """Return a rate as text, in units that a GPU's and a CPU's both fit."""
    exponent, prefix = (12, "T") if per_second >= 1e11 else (9, "G")
    return f"{per_second / 10**exponent:.3g} {prefix}{what}/s"


def _read(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        result["conditions"].items()
        for shape in result["shapes"]:
            sum(shape[name] for name in _COMPARED)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not a result that scripts/bench.sh --output has written ({first_line(error)})"
        ) from None
    return result
