"""Make numbers that are kept of a study's result folder, and tables of those.

python -m scripts.lab.study.page OUT                  collect OUT into OUT/study.json and print its tables
python -m scripts.lab.study.page OUT --docs docs      and keep the numbers in docs/results/study.json

`python -m scripts.lab.tables` then puts them on the pages. Sections that OUT lacks stay as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.scoring import summarize
from common.tables import markdown
from scripts.lab.study.bootstrap import Interval, difference, gain, in_points, paired_interval

# What each sweep is compared with; of several the one that is right most often, and of equal ones the fastest.
BASES = {
    "table": (
        "vanilla",
        "one token a step, one block at a time",
        "fast_dllm, tau 0.9",
        "d2f, tau 0.9",
        "d2f, tau 0.95",
        "d2f, tau 0.98",
        "d2f, tau 0.95, one block at a time",
    ),
    "study_lookahead": tuple(f"k = 0, tau {tau}" for tau in ("0.8", "0.85", "0.9", "0.95", "0.98", "0.99")),
    "block": tuple(f"skip_threshold={tau}, num_lookahead=0" for tau in ("0.6", "0.8", "0.9", "0.95", "0.98")),
    "block_pipelined": ("k = 0, opens at 1",),
    "study_scores": ("mean, as published",),
    "study_spawn": ("confident, as published",),
    "study_budget": ("k = 7",),
    "study_boundaries": ("stale, full",),
    "study_policies": ("LoPA",),
    "study_confirmed": ("LoPA",),
    "study_verification": ("k = 0",),
    "study_seeds": ("greedy",),
    "study_precision": ("bfloat16",),
}
POOLED = ("study_policies", "study_confirmed")  # also shown with math and code problems together
_ENVIRONMENT = ("engine", "device", "device_name", "dtype", "quantization", "torch", "commit")

Record = Mapping[str, Any]


def collect(folder: Path) -> dict[str, Any]:
    """All sections of a result folder, by `run/sweep`, and what the other parts of the study found, by their name."""
    sections = {
        f"{path.parent.parent.name}/{path.parent.name}": _section(path)
        for path in sorted(folder.glob("*/*/sweep.json"))
    }
    for name in POOLED:
        own = [folder / run / name / "sweep.json" for run in ("demo", "demo_code")]
        if all(path.exists() for path in own):
            sections[f"both/{name}"] = _pooled(own, BASES[name])
    parts = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("part_*.json"))}
    return sections | {name: _part(part) for name, part in parts.items()}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """What a page tells of it: not every problem."""
    kept = {key: value for key, value in part.items() if key != "rows"}
    return {**kept, "environment": _environment(part.get("environment", {}))}


def _environment(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in _ENVIRONMENT if found.get(name) is not None}


def _section(path: Path) -> dict[str, Any]:
    """The points that are done. gain, accuracy_gain: against the section's base, with 95 % intervals over the problems
    that both have answered. step_ms: mean time of a step, where requests were decoded one by one."""
    done = [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["status"] == "done"]
    records = {row["name"]: _records(path.parent, row) for row in done}
    base = _base(done, BASES.get(path.parent.name, ()))
    rows = [_point(row, records[row["name"]], None if base is None else records[base]) for row in done]
    environment = done[0]["metrics"].get("environment", {}) if done else {}
    return {"base": base, "environment": _environment(environment), "rows": rows}


def _pooled(paths: Sequence[Path], bases: tuple[str, ...]) -> dict[str, Any]:
    """The points that are done in all of these sweeps, over all their problems together."""
    records: dict[str, dict[str, Record]] = {}
    for number, path in enumerate(paths):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row["status"] == "done":
                own = {f"{number} {key}": record for key, record in _records(path.parent, row).items()}
                records[row["name"]] = {**records.get(row["name"], {}), **own}
    most = max(map(len, records.values()))
    whole = {name: own for name, own in records.items() if len(own) == most}
    metrics = {name: summarize(own.values()) for name, own in whole.items()}
    rows = [{"name": name, "metrics": found} for name, found in metrics.items()]
    base = _base(rows, bases)
    points = [_point(row, whole[row["name"]], None if base is None else whole[base]) for row in rows]
    return {"base": base, "rows": points}


def _records(folder: Path, row: Mapping[str, Any]) -> dict[str, Record]:
    from common.config import slug

    lines = (folder / f"{slug(row['name'])}.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {str(record["id"]): record for record in records if "error" not in record}


def _base(done: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    candidates = [row for row in done if row["name"] in names]
    best = max(candidates, key=_accuracy_and_speed, default=None)
    return None if best is None else str(best["name"])


def _accuracy_and_speed(row: Mapping[str, Any]) -> tuple[float, float]:
    metrics = row["metrics"]
    correct = metrics["accuracy"]["correct"] if metrics["accuracy"] else 0
    return correct, metrics["tpf"]["effective"]["per_request_mean"]


def _point(row: Mapping[str, Any], own: dict[str, Record], base: dict[str, Record] | None) -> dict[str, Any]:
    metrics = row["metrics"]
    accuracy = metrics["accuracy"] or {}
    point = {
        "name": row["name"],
        "requests": metrics["requests"]["finished"],
        "correct": accuracy.get("correct"),
        "standard_error": _rounded(accuracy.get("standard_error"), 4),
        "tpf_effective": _rounded(metrics["tpf"]["effective"]["per_request_mean"], 3),
        "tpf_canvas": _rounded(metrics["tpf"]["canvas"]["per_request_mean"], 3),
        "steps": _rounded(metrics["steps"]["mean"], 2),
        "rows_per_step": _rounded(metrics.get("rows_per_step"), 2),
    }
    if metrics.get("run", {}).get("max_num_requests") == 1:
        point["step_ms"] = _rounded(1000 * metrics["latency_s"]["mean"] / metrics["steps"]["mean"], 3)
    shared = sorted(own.keys() & base.keys()) if base is not None else []
    if base is None or base is own or not shared:
        return point
    speeds, rights = (
        [[float(records[key][name]) for key in shared] for records in (own, base)]
        for name in ("tpf_effective", "correct" if all("correct" in own[key] for key in shared) else "steps")
    )
    point["gain"] = _kept(paired_interval(*speeds, gain))
    if accuracy:
        point["accuracy_gain"] = _kept(paired_interval(*rights, difference))
    return point


def _kept(interval: Interval) -> list[float]:
    return [round(value, 4) for value in interval]


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Markdown by section."""
    made = {"rows": table, "orders": orders_table, "among_branches": foresight_table}
    return {name: write(section) for name, section in results.items() for key, write in made.items() if key in section}


def table(section: Mapping[str, Any]) -> str:
    headings = ["setting", "right, %", "against the base, points", "TPF", "gain, %", "rows a step"]
    rows = [list(_cells(row, section["base"])) for row in section["rows"]]
    if all("step_ms" in row for row in section["rows"]):
        headings.append("ms a step")
        rows = [[*cells, f"{row['step_ms']:.2f}"] for cells, row in zip(rows, section["rows"], strict=True)]
    return written(headings, rows)


def side_by_side(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the settings that all sections have, with accuracy and TPF in each, under the sections' names."""
    found = [{row["name"]: row for row in section["rows"]} for section in sections.values()]
    headings = ["setting"]
    for name in sections:
        headings += [f"{name}: right, %", "against the base, points", "TPF"]
    rows = []
    for name in (name for name in found[0] if all(name in section for section in found)):
        cells = [name]
        for section, points in zip(sections.values(), found, strict=True):
            cells += _right(points[name], section["base"])
            cells.append(f"{points[name]['tpf_effective']:.2f}")
        rows.append([*cells, ", ".join(_rows_per_step(points[name]) for points in found)])
    return written([*headings, "rows a step"], rows)


def written(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table of a page. Columns are not aligned, so that a difference shows the rows that changed."""
    return markdown(headings, rows, is_aligned=False) + "\n"


def accuracy_and_tpf(row: Mapping[str, Any]) -> tuple[str, str]:
    return _accuracy(row), f"{row['tpf_effective']:.2f}"


def _accuracy(row: Mapping[str, Any]) -> str:
    return f"{100 * row['correct'] / row['requests']:.1f} ± {100 * row['standard_error']:.1f} %"


def orders_table(part: Mapping[str, Any]) -> str:
    mean = part["mean"]
    headings = ["problems, orders of each", "worst", "mean", "best", f"LoPA, k = {part['num_lookahead']}", "k = 0",
                "orders that LoPA reaches", "right: random, LoPA"]  # fmt: skip
    tpf = [f"{mean[name]:.2f}" for name in ("worst", "mean", "best", "lopa", "no_lookahead")]
    shares = f"{100 * mean['percentile']:.0f} %", f"{100 * mean['right']:.0f} %, {100 * mean['lopa_right']:.0f} %"
    return written(headings, [[f"{part['problems']}, {part['orders']}", *tpf, *shares]])


def foresight_table(part: Mapping[str, Any]) -> str:
    over_time = part["over_time"]
    headings = ["problems, steps", "branches of a step: what each would fill at once"]
    headings += [f"winners: tokens of {span} step{'s' * (span > 1)}" for span in (1, 2, 3)]
    found = [part["among_branches"]["mean_rank_correlation"]]
    found += [over_time[f"tokens_of_{span}_steps"] for span in (1, 2, 3)]
    return written(headings, [[f"{part['problems']}, {part['steps']}", *(f"{value:+.2f}" for value in found)]])


def _cells(row: Mapping[str, Any], base: str | None) -> Iterator[str]:
    yield row["name"]
    yield from _right(row, base)
    yield f"{row['tpf_effective']:.2f}"
    yield _interval(row.get("gain"))
    yield _rows_per_step(row)


def _right(row: Mapping[str, Any], base: str | None) -> tuple[str, str]:
    """How many are right, and how many more than with the base."""
    accuracy = "-" if row["correct"] is None else _accuracy(row).removesuffix(" %")
    return accuracy, "base" if row["name"] == base else _interval(row.get("accuracy_gain"))


def _rows_per_step(row: Mapping[str, Any]) -> str:
    return "-" if row["rows_per_step"] is None else f"{row['rows_per_step']:.1f}"


def _interval(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else in_points(interval)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    found = collect(options.folder)
    if not found:
        parser.error(f"{options.folder} holds no results of a study: run scripts/lab/study.sh first")
    (options.folder / "study.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, text in tables(found).items():
        print(f"{name}\n\n{text}")
    if options.docs is not None:
        kept = options.docs / "results" / "study.json"
        known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        kept.write_text(json.dumps({**known, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
