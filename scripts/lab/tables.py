"""Write the tables of the pages from the result files of docs/results, and from nowhere else.

python -m scripts.lab.tables

A table stands on a page between `<!-- table: NAME -->` and `<!-- end -->`. NAME is a result file of docs/results, such
as `load_7b_h200`, or a table that a function below makes of one. A result file of its own table has

    card, commit, conditions, command     what is said above the table, once; any may be absent
    tables                                several of these by name, `NAME/part`, instead of the next two
    columns                               [heading, format of Python such as ".2f" or "" for text] each
    rows                                  a list of cells each; null is a dash

A page that needs a few rows and columns of a table has a view of it, `NAME/short` (`views.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from scripts.lab.study import page as study
from scripts.lab.views import VIEWS, View

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "scripts" / "lab").glob("*.md"))]
WIDTH = 118
_MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FRONT = (
    ("most accurate without lookahead", None),
    ("d2f, k = 0", "d2f, tau 0.95"),
    ("LoPA, k = 3", "LoPA, k = 3"),
    ("LoPA, k = 7", "LoPA, k = 7"),
    ("control: k = 7, a random winner", "k = 7, random winner"),
)

Result = Mapping[str, Any]


def tables() -> dict[str, str]:
    """Return every table by its name, in Markdown."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    made = {name: table(result) for name, result in results.items() if "columns" in result}
    made |= {
        f"{name}/{part}": table(found)
        for name, result in results.items()
        for part, found in result.get("tables", {}).items()
    }
    made |= {f"study/{name}": text for name, text in study.tables(results["study"]).items()}
    made |= {f"study/{name}": text for name, text in side_by_side(results["study"]).items()}
    made |= {name: write(results) for name, write in _WRITERS.items()}
    made |= {f"{name}/short": short(results, name, view) for name, view in VIEWS.items()}
    return made


def table(result: Result) -> str:
    """Return what holds for all rows, and the rows."""
    headings = [heading for heading, _ in result["columns"]]
    rows = [
        [_cell(value, form) for value, (_, form) in zip(row, result["columns"], strict=True)] for row in result["rows"]
    ]
    return _with_source(result, study.written(headings, rows))


def _cell(value: object, form: str) -> str:
    return "-" if value is None else value if isinstance(value, str) else format(value, form)


def _with_source(result: Result, text: str) -> str:
    commit = f"at commit {result['commit']}" if "commit" in result else None
    where = ", ".join(part for part in (result.get("card"), commit) if part)
    parts = (where, result.get("conditions"), result.get("command") and f"`{result['command']}`")
    said = ". ".join(part.rstrip(".") for part in parts if part)
    lines = fill(f"{said}.", WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"{lines}\n\n{text}" if said else text


def short(results: Mapping[str, Result], name: str, view: View) -> str:
    """Return the view of a table. Raises ValueError for a cell that no row has."""
    file, _, part = name.partition("/")
    result = results[file]["tables"][part] if part else results[file]
    headings = [heading for heading, _ in result["columns"]]
    places = [headings.index(heading) for heading in view.columns]
    rows = result["rows"]
    for heading, said in view.where.items():
        place = headings.index(heading)
        if missing := set(said) - {row[place] for row in rows}:
            raise ValueError(f"{name} has no {heading} of {sorted(missing)}")
        rows = [row for row in rows if row[place] in said]
    columns = [
        [renamed, result["columns"][place][1]] for renamed, place in zip(view.columns.values(), places, strict=True)
    ]
    rows = [[view.words.get(str(row[place]), row[place]) for place in places] for row in rows]
    source = {key: result[key] for key in ("card", "commit") if key in result}
    source |= {"conditions": view.conditions} if view.conditions else {}
    return table({**source, "columns": columns, "rows": rows})


def side_by_side(sections: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of sweeps that two models or two kinds of problems have."""
    pairs = {
        "math_and_code": {"math": "demo", "code": "demo_code"},
        "both_models": {"demo_block": "demo_block", "distilled": "demo_block_distilled"},
    }
    made = {}
    for name, runs in pairs.items():
        for sweep in sorted({key.partition("/")[2] for key in sections}):
            found = {label: sections[f"{run}/{sweep}"] for label, run in runs.items() if f"{run}/{sweep}" in sections}
            if len(found) == len(runs):
                made[f"{name}/{sweep}"] = study.side_by_side(found)
    return made


def front(results: Mapping[str, Result]) -> str:
    """The README's: accuracy and tokens a pass of math and code problems."""
    sections = [results["study"][name] for name in ("demo/table", "demo_code/table")]
    by_name = [{row["name"]: row for row in section["rows"]} for section in sections]
    rows = [
        [
            label,
            *(
                cell
                for found, section in zip(by_name, sections, strict=True)
                for cell in study.accuracy_and_tpf(found[name or section["base"]])
            ),
        ]
        for label, name in _FRONT
    ]
    return study.written(["demo model", "math: accuracy", "TPF", "code: accuracy", "TPF"], rows)


def steps(results: Mapping[str, Result]) -> str:
    result = results["steps_h200"]
    rows = []
    for shape in result["shapes"]:
        floors = shape["weight_floor_ms"], shape["matrix_floor_ms"]
        numbers = shape["device_ms"], *floors
        above = shape["device_ms"] / max(floors)
        rows.append([f"{shape['rows']} x {shape['width']}", *(f"{number:.2f}" for number in numbers), f"{above:.2f}"])
    headings = ["rows x window", "step ms", "weight floor", "matrix floor", "step / higher floor"]
    return _with_source(result, study.written(headings, rows))


def curve(results: Mapping[str, Result]) -> str:
    rows = []
    for math, code in zip(results["lookahead_math"]["rows"], results["lookahead_code"]["rows"], strict=True):
        cells = [str(math["num_lookahead"])]
        for row in (math, code):
            cells.append(f"{100 * row['accuracy']:.1f} ± {100 * row['standard_error']:.1f} %")
            cells += [f"{row['tpf_effective']:.2f}", f"{row['steps']:.1f}"]
        rows.append(cells)
    headings = ["k", "math: accuracy", "TPF", "passes", "code: accuracy", "TPF", "passes"]
    return _with_source(results["lookahead_math"], study.written(headings, rows))


def block_diffusion(results: Mapping[str, Result]) -> str:
    """Thresholds down, numbers of lookaheads across, of both block-diffusion models; all: the study."""
    rows = []
    for name, label in (("demo_block/block", "demo_block"), ("demo_block_distilled/block", "distilled")):
        found = {row["name"]: row for row in results["study"][name]["rows"]}
        for tau in ("0.9", "0.98"):
            points = [found[f"skip_threshold={tau}, num_lookahead={k}"] for k in (0, 1, 7)]
            rows.append([f"{label}, {tau}", *(cell for row in points for cell in study.accuracy_and_tpf(row))])
    headings = ["model, tau_conf", "k = 0", "TPF", "k = 1", "TPF", "k = 7", "TPF"]
    environment = results["study"]["demo_block/block"]["environment"]
    conditions = "500 held-out math problems, blocks of 16; accuracy and tokens a pass by k and threshold"
    source = {"card": environment["device"], "conditions": conditions}
    return _with_source(source, study.written(headings, rows))


def scheduler(results: Mapping[str, Result]) -> str:
    result = results["scheduler"]
    families = ["dream", "llada", "sdar", "llada2 edits", "fast_dllm_v2"]
    of = {(row["requests"], row["family"]): row["now"] for row in result["rows"] if row["num_lookahead"] == 3}
    counts = sorted({requests for requests, _ in of})
    rows = [[str(n), *(_cell(of.get((n, family)), ",.0f") for family in families)] for n in counts]
    source = {"card": result["host"], "commit": result["now"], "conditions": f"k = 3, {result['what']}"}
    headings = ["requests", "Dream", "LLaDA", "SDAR", "LLaDA2, edits", "Fast-dLLM v2"]
    return _with_source(source, study.written(headings, rows))


def loads(results: Mapping[str, Result]) -> str:
    """The better of the runs of each number of requests at once."""
    result = results["loops_h100"]
    d2f, blocks = (
        [max(column) for column in zip(*result[name]["now"], strict=True)] for name in ("d2f", "block_diffusion")
    )
    rows = [
        [str(at_once), f"{first:,.0f}", f"{second:,.0f}"]
        for at_once, first, second in zip(result["d2f"]["at_once"], d2f, blocks, strict=True)
    ]
    conditions = "Tokens/s over 300 problems, k = 3, the better of the runs; `lopa bench load`"
    source = {"card": result["card"], "commit": result["now"], "conditions": conditions}
    return _with_source(source, study.written(["requests at once", "models/demo", "models/demo_block"], rows))


def temperature(results: Mapping[str, Result]) -> str:
    """Temperatures down."""
    result = results["temperature_h100"]
    ways = [(k, acts_on) for k in (0, 7) for acts_on in ("draw", "draw_and_confidence")]
    of = {(p["temperature"], p["num_lookahead"], p["temperature_acts_on"]): p for p in result["points"]}
    rows = [[f"{t:g}", *(_share_and_tpf(of[(t, *way)]) for way in ways)] for t in sorted({key[0] for key in of})]
    return _with_source(result, study.written(["temperature", *(f"k = {k}, {acts_on}" for k, acts_on in ways)], rows))


def _share_and_tpf(point: Mapping[str, Any]) -> str:
    return f"{100 * point['correct'] / point['scored']:.1f} %, {point['tpf_effective']:.2f}"


_WRITERS: Mapping[str, Callable[[Mapping[str, Result]], str]] = {
    "front": front,
    "steps": steps,
    "curve": curve,
    "block_diffusion": block_diffusion,
    "scheduler": scheduler,
    "loads": loads,
    "temperature": temperature,
}


def with_tables(page: str, written: Mapping[str, str]) -> str:
    """Return the page with every marked table put in. Raises ValueError for a mark without end or an unknown name."""
    if page.count("<!-- table: ") != len(_MARK.findall(page)):
        raise ValueError("a comment `<!-- table: NAME -->` has no `<!-- end -->` after it")
    unknown = sorted({mark[2] for mark in _MARK.finditer(page)} - written.keys())
    if unknown:
        raise ValueError(f"no table is called {', '.join(unknown)}: there are {', '.join(sorted(written))}")
    return _MARK.sub(lambda mark: f"{mark[1]}{written[mark[2]]}{mark[3]}", page)


def write(pages: Sequence[Path] = PAGES) -> None:
    written = tables()
    for path in pages:
        path.write_text(with_tables(path.read_text(encoding="utf-8"), written), encoding="utf-8")


if __name__ == "__main__":
    write()
