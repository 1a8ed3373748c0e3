"""The tables that people read at the end of a run and of a sweep: every number beside what it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from common.errors import harmless
from common.processes import inform
from common.scoring import DEFINITIONS
from common.tables import counted

# What the tables call what result files have under these keys.
_WORDS = {
    "tpf": "TPF",
    "tps": "TPS",
    "without_first_step": "without first step",
    "latency_s": "latency",
    "this_start": "this start",
}
_PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}  # names are no markup
_MIN_WIDTH = 140  # for logs: a table that wraps at 80 columns cannot be read


def print_summary(title: str, metrics: Mapping[str, Any], *, details: bool = False) -> None:
    """Print a few lines; with `details` every number and what it means."""
    if not metrics["tokens"]["canvas"]:  # nothing was decoded: all are errors, or texts were only scored
        inform("\n".join(["; ".join(_outcome(metrics)), title]))
    elif details:
        _print_details(title, metrics)
    else:
        inform("\n".join([*_summary(metrics), f"{title} (--details prints every number and what it means)"]))


def _summary(metrics: Mapping[str, Any]) -> list[str]:
    tpf, tps, latency = metrics["tpf"], metrics["tps"]["effective"]["with_first_step"], metrics["latency_s"]
    start = metrics.get("this_start")
    lines = [
        "; ".join(_outcome(metrics)),
        f"TPF {number(tpf['effective']['per_request_mean'])} effective, {number(tpf['canvas']['per_request_mean'])} "
        f"canvas; {number(metrics['steps']['mean'])} steps a request",
        f"{number(tps['mean'], 1)} tokens/s a request",
        f"latency {number(latency['mean'], 3)} s a request, {number(latency['max'], 3)} s at most",
    ]
    if start is not None:
        together = number(start["tps_aggregate"]["effective"], 1)
        lines[2] += (
            f", {together} together (this start: {counted(start['requests'], 'request')} in {start['wall_s']:.1f} s)"
        )
    return lines


def _print_details(title: str, metrics: Mapping[str, Any]) -> None:
    table = Table(title=harmless(title), title_justify="left")
    for heading in ("", "canvas", "effective"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, canvas, effective in _rows(metrics):
        table.add_row(name, canvas, effective)
    console = _console()
    console.print(harmless(_facts(metrics)))
    console.print(table)
    console.print("\n".join(meanings(("canvas", "effective", "tpf", "tps", "without_first_step", "latency_s"))))


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def accuracy(metrics: Mapping[str, Any]) -> str:
    found = metrics["accuracy"]
    return "-" if found is None else f"{100 * found['share']:.1f} ± {100 * found['standard_error']:.1f} %"


def _rows(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    tpf, tps = metrics["tpf"], metrics["tps"]
    rows = [(f"TPF, {name}", number(tpf["canvas"][key]), number(tpf["effective"][key])) for key, name in _TPF_ROWS]
    for which, suffix in (("with_first_step", ""), ("without_first_step", ", without first step")):
        for key, name in _TPS_ROWS:
            canvas, effective = (number(tps[count][which][key], 1) for count in ("canvas", "effective"))
            rows.append((f"TPS, {name}{suffix}", canvas, effective))
    start = metrics.get("this_start")
    if start is not None:
        canvas, effective = (number(start["tps_aggregate"][count], 1) for count in ("canvas", "effective"))
        rows.append(("TPS, aggregate of this start", canvas, effective))
    return rows


_TPF_ROWS = (("per_request_mean", "mean of requests"), ("total", "all tokens / all steps"))
_TPS_ROWS = (("mean", "mean of requests"), ("max", "max"), ("top10_mean", "mean of the 10 best"))


def _facts(metrics: Mapping[str, Any]) -> str:
    facts, start = _outcome(metrics), metrics.get("this_start")
    facts.append(f"{number(metrics['steps']['mean'])} steps and {number(metrics['latency_s']['mean'], 3)} s a request")
    if start is not None:
        facts.append(f"this start: {start['requests']} requests in {start['wall_s']:.1f} s")
    return "; ".join(facts)


def _outcome(metrics: Mapping[str, Any]) -> list[str]:
    requests, found = metrics["requests"], metrics["accuracy"]
    facts = [f"{counted(requests['finished'], 'request')} finished, {counted(requests['errors'], 'error')}"]
    if found is not None:
        facts.append(f"accuracy {accuracy(metrics)} ({found['correct']} of {found['scored']})")
        facts += [f"{rule} {100 * marks['share']:.1f} %" for rule, marks in found.get("by_rule", {}).items()]
        facts += [f"marked by {by}" for by in found.get("scored_by", {})]
    return facts


def meanings(names: Sequence[str]) -> list[str]:
    """Return what these numbers of a run mean, a line each."""
    return [f"{_WORDS.get(name, name)}: {DEFINITIONS[name]}" for name in names]


def _console() -> Console:
    console = Console(**_PLAIN)
    return console if console.is_terminal else Console(**_PLAIN, width=_MIN_WIDTH)


def sweep_table(title: str, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of a sweep, one row a setting."""
    headings = [title, "accuracy", "TPF canvas", "TPF effective", "steps", "TPS effective", "latency s", "n", "errors"]
    return headings, [_sweep_cells(row["name"], row["metrics"]) for row in rows]


def _sweep_cells(name: str, metrics: Mapping[str, Any]) -> list[str]:
    return [
        name,
        accuracy(metrics),
        number(metrics["tpf"]["canvas"]["per_request_mean"]),
        number(metrics["tpf"]["effective"]["per_request_mean"]),
        number(metrics["steps"]["mean"], 1),
        number(metrics["tps"]["effective"]["with_first_step"]["mean"], 1),
        number(metrics["latency_s"]["mean"], 3),
        str(metrics["requests"]["finished"]),
        str(metrics["requests"]["errors"]),
    ]


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], remarks: Sequence[str]) -> None:
    table = Table()
    for index, heading in enumerate(headings):
        table.add_column(harmless(heading), justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*map(harmless, row))
    console = _console()
    console.print(table)
    told = meanings(("accuracy", "step", "tpf", "canvas", "effective", "tps", "latency_s"))
    console.print("\n".join([*told, *map(harmless, remarks)]))
