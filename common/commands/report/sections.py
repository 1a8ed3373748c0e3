"""What the report shows of a study: a section is a picture, what it means, and the table it is drawn from.

A section without data says so in a sentence.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.batch import accuracy, number
from common.commands.report.study import Metrics, Point, Study, differing
from common.commands.report.svg import Bar, Plot, bars, colour, short, ticks
from common.scoring import DEFINITIONS, area_under_accuracy

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
WORDS = (
    "TPF: tokens per forward pass. A pass tries k + 1 branches: the anchor, which holds what is decided, and k "
    "lookaheads, each with one more position filled; the one that leaves the model surest wins. Window: the positions "
    "that a branch computes in a pass."
)
_MOST_BARS = 40
_K = "num_lookahead"
_THRESHOLDS = ("skip_threshold", "decoded_token_threshold", "block_add_threshold")
_PARTS = (("layers_ms", "layers"), ("head_ms", "head"), ("gather_ms", "gather"))
_HOST_PARTS = ("schedule", "forward", "select", "commit", "advance")
_STEP_PARTS = (*_HOST_PARTS, "device", "outside_device", "step")


@dataclass(frozen=True, slots=True)
class Section:
    """legend: (class, name) of what the picture draws. conditions: of numbers that are no points of the study. absent:
    why there is nothing to show."""

    title: str
    meaning: str
    picture: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    table: Table | None = None
    conditions: tuple[str, ...] = ()
    absent: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one series that differ in nothing but what is varied."""

    name: str
    pairs: tuple[tuple[Point, Metrics], ...]


def sections(study: Study) -> list[Section]:
    return [
        _accuracy_over_tpf(study),
        _tpf_over_k(study),
        _speed(study),
        _wins(study),
        _windows(study),
        *_step_times(study),
    ]


def conclusion(study: Study) -> str:
    """Say which setting fills the most tokens a pass, without losing accuracy where answers were marked."""
    measured = sorted(study.measured, key=lambda pair: _tpf(pair[1]))
    if not measured:
        return "Nothing is measured yet."
    slowest, scored = measured[0], [pair for pair in measured if pair[1]["accuracy"] is not None]
    if not scored:
        fastest, condition = measured[-1], "; no answer was marked right or wrong"
    else:
        slowest, condition = scored[0], " without losing accuracy by more than the standard error"
        fastest = [pair for pair in scored if not _is_worse(pair[1]["accuracy"], slowest[1]["accuracy"])][-1]
    said = f"{_told(fastest)} fills the most tokens a pass{condition}"
    said += "." if fastest is slowest else f"; {_told(slowest)} fills the fewest."
    rates = {point.name: _rates(metrics)["mean"] or 0.0 for point, metrics in measured}
    quickest = max(rates, key=lambda name: rates[name])
    return f"{said} The fastest by the clock is {quickest}: {rates[quickest]:.1f} tokens per second of a request."


def _are_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(abs(one["share"] - other["share"]) > one["standard_error"] + other["standard_error"])


def _is_worse(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    error = math.hypot(one["standard_error"], other["standard_error"])
    return bool(one["share"] < other["share"] - error)


def _told(pair: tuple[Point, Metrics]) -> str:
    point, metrics = pair
    right = "" if metrics["accuracy"] is None else f", accuracy {accuracy(metrics)}"
    return f"{point.name} (TPF {_tpf(metrics):.2f}{right})"


def results_table(study: Study) -> Table:
    """A row a point: everything that must be read together."""
    headings = [
        "#", "setting", "accuracy", "TPF canvas", "TPF effective", "TPS mean", "TPS max", "TPS aggregate", "latency s",
        "steps", "n", "errors",
    ]  # fmt: skip
    return headings, [_result_row(point) for point in study.points]


def conditions(pairs: Sequence[tuple[Point, Metrics]]) -> tuple[str, ...]:
    """Conditions of these points, a line for all that share them."""
    numbers_of: dict[str, list[int]] = {}
    for point, _ in pairs:
        numbers_of.setdefault(point.conditions, []).append(point.number)
    if len(numbers_of) == 1:
        return tuple(numbers_of)
    return tuple(f"{_ranges(numbers)}: {text}" for text, numbers in numbers_of.items())


def _result_row(point: Point) -> list[str]:
    head = [str(point.number), point.name]
    metrics = point.metrics
    if metrics is None:
        return [*head, f"{point.status}{f': {point.error}' if point.error else ''}", *["-"] * 9]
    rates, start = metrics["tps"]["effective"]["with_first_step"], metrics.get("this_start") or {}
    return [
        *head,
        accuracy(metrics),
        number(metrics["tpf"]["canvas"]["per_request_mean"]),
        number(_tpf(metrics)),
        number(rates["mean"], 1),
        number(rates["max"], 1),
        number((start.get("tps_aggregate") or {}).get("effective"), 1),
        number(metrics["latency_s"]["mean"], 3),
        number(metrics["steps"]["mean"], 1),
        str(metrics["requests"]["finished"]),
        str(metrics["requests"]["errors"]),
    ]


def _tpf(metrics: Metrics) -> float:
    value: float = metrics["tpf"]["effective"]["per_request_mean"]
    return value


def _accuracy_over_tpf(study: Study) -> Section:
    title, meaning = "Accuracy over TPF", "Bars: one standard error. A line joins points whose bars do not overlap."
    scored = [(point, metrics) for point, metrics in study.measured if metrics["accuracy"] is not None]
    if not scored:
        return Section(title, meaning, absent="No answer of this study was marked right or wrong.")
    shares = [(metrics["accuracy"]["share"], metrics["accuracy"]["standard_error"]) for _, metrics in scored]
    low, high = min(share - error for share, error in shares), max(share + error for share, error in shares)
    plot = Plot(
        title, ticks(min(_tpf(metrics) for _, metrics in scored), max(_tpf(metrics) for _, metrics in scored)),
        ticks(max(0.0, low), min(1.0, high)), "tokens per forward pass, effective", "accuracy",
        y_name=lambda value: f"{100 * value:.10g} %",
    )  # fmt: skip
    curves = [_scored(curve) for curve in _curves(study)]
    for place, curve in enumerate(curves):
        for pair in itertools.pairwise(metrics for _, metrics in curve.pairs):
            if _are_apart(*(metrics["accuracy"] for metrics in pair)):
                plot.line([(_tpf(metrics), metrics["accuracy"]["share"]) for metrics in pair], colour(place))
    for place, curve in enumerate(curves):
        for point, metrics in curve.pairs:
            share, error = metrics["accuracy"]["share"], metrics["accuracy"]["standard_error"]
            about = f"{point.name}: {accuracy(metrics)} at TPF {_tpf(metrics):.2f}"
            plot.spread(_tpf(metrics), max(share - error, plot.y[0]), min(share + error, plot.y[-1]), colour(place))
            plot.dot(_tpf(metrics), share, colour(place), about)
    for place, curve in enumerate(curves):
        for point, metrics in curve.pairs:
            plot.label(_tpf(metrics), metrics["accuracy"]["share"], _mark(point, curve), colour(place))
    areas = [area_under_accuracy([metrics for _, metrics in curve.pairs]) for curve in curves]
    if any(areas):
        meaning += f" Accuracy and speed in one number, {DEFINITIONS['area_under_accuracy']}."
    legend = tuple(
        (colour(place), curve.name if area is None else f"{curve.name}, AUP {area:.1f}")
        for place, (curve, area) in enumerate(zip(curves, areas, strict=True))
    )
    return Section(title, meaning, plot.svg(), legend)


def _tpf_over_k(study: Study) -> Section:
    title = "TPF over k"
    meaning = "Full lines: effective, up to the answer's end; dashed: the whole canvas."
    curves = [_over_k(curve) for curve in _curves(study, (_K,))]
    curves = [curve for curve in curves if len({point.decode[_K] for point, _ in curve.pairs}) > 1]
    if not curves:
        return Section(title, meaning, absent="No two settings of this study differ in num_lookahead alone.")
    pairs = [pair for curve in curves for pair in curve.pairs]
    counts = sorted({int(point.decode[_K]) for point, _ in pairs})
    canvas = [metrics["tpf"]["canvas"]["per_request_mean"] for _, metrics in pairs]
    plot = Plot(
        title, ticks(counts[0], counts[-1]), ticks(0, max(*canvas, *(_tpf(metrics) for _, metrics in pairs))),
        "lookahead branches k", "tokens per forward pass",
    )  # fmt: skip
    for place, curve in enumerate(curves):
        effective = [(point.decode[_K], _tpf(metrics)) for point, metrics in curve.pairs]
        whole = [(point.decode[_K], metrics["tpf"]["canvas"]["per_request_mean"]) for point, metrics in curve.pairs]
        plot.line(whole, f"{colour(place)} dashed")
        plot.line(effective, colour(place))
        for (k, tpf), (point, _) in zip(effective, curve.pairs, strict=True):
            plot.dot(k, tpf, colour(place), f"{point.name}: TPF {tpf:.2f}")
    headings = ["curve", *(f"k = {k}" for k in counts)]
    rows = []
    for curve in curves:
        found = {point.decode[_K]: number(_tpf(metrics)) for point, metrics in curve.pairs}
        rows.append([curve.name, *(found.get(k, "-") for k in counts)])
    legend = tuple((colour(place), curve.name) for place, curve in enumerate(curves))
    return Section(title, meaning, plot.svg(), legend, (headings, rows))


def _speed(study: Study) -> Section:
    title = "Tokens per second"
    meaning = "Bars: the mean of the requests; marks: the fastest; effective tokens, by the clock."
    pairs = [pair for pair in study.measured if _rates(pair[1])["mean"] is not None]
    if not pairs:
        return Section(title, meaning, absent="No request of this study has a time.")
    axis = ticks(0, max(_rates(metrics)["max"] for _, metrics in pairs), 5)
    rows = [
        Bar(
            f"{point.number} {point.name}",
            f"{_rates(metrics)['mean']:.0f}, {metrics['latency_s']['mean']:.3f} s",
            [(_rates(metrics)["mean"], "c0", f"mean {_rates(metrics)['mean']:.1f} tokens/s")],
            [(_rates(metrics)["max"], "c1", f"max {_rates(metrics)['max']:.1f} tokens/s")],
        )
        for point, metrics in pairs[:_MOST_BARS]
    ]
    picture = bars(title, rows, axis, short, "tokens per second of a request")
    legend = (("c0", "mean, and the mean latency in seconds"), ("c1", "max"))
    return Section(title, _with_rest(meaning, pairs), picture, legend)


def _wins(study: Study) -> Section:
    title, meaning = "Which branch won", f"Shares of all steps. {_sentence(DEFINITIONS['wins_by_branch'])}"
    pairs = [(point, metrics) for point, metrics in study.measured if metrics.get("wins_by_branch")]
    if not pairs:
        return Section(title, meaning, absent="The results of this study do not say which branch won.")
    rows = []
    for point, metrics in pairs[:_MOST_BARS]:
        wins, total = metrics["wins_by_branch"], sum(metrics["wins_by_branch"])
        parts = [
            (count / total, _shade(branch), f"{_branch(branch)}: {100 * count / total:.1f} % of {total} steps")
            for branch, count in enumerate(wins)
        ]
        rows.append(Bar(f"{point.number} {point.name}", f"lookaheads {100 * (1 - wins[0] / total):.0f} %", parts))
    most = max(len(metrics["wins_by_branch"]) for _, metrics in pairs)
    picture = bars(title, rows, ticks(0, 1, 5), lambda value: f"{100 * value:g} %", "share of the steps")
    legend = tuple((_shade(branch), _branch(branch)) for branch in range(min(most, 5)))
    if most > 5:
        legend = (*legend[:4], (_shade(4), "B4 and later"))
    cells = [
        [str(point.number), point.name, *map(str, wins), *["-"] * (most - len(wins))]
        for point, wins in ((point, metrics["wins_by_branch"]) for point, metrics in pairs)
    ]
    table = ["#", "setting", *(_branch(branch) for branch in range(most))], cells
    return Section(title, _with_rest(meaning, pairs), picture, legend, table)


def _windows(study: Study) -> Section:
    title = "Windows"
    meaning = (
        "Positions that the winning branch computed in a step: bars from a quarter of the steps to three quarters, "
        f"marks at the median and the widest. {_sentence(DEFINITIONS['windows'])}"
    )
    pairs = [(point, metrics) for point, metrics in study.measured if metrics.get("windows")]
    if not pairs:
        return Section(title, meaning, absent="The results of this study do not say how wide windows were.")
    quantiles = [_quantiles(metrics["windows"]) for _, metrics in pairs]
    axis = ticks(0, max(values[-1] for values in quantiles), 5)
    rows = []
    for (point, _), (low, middle, high, widest) in zip(pairs[:_MOST_BARS], quantiles, strict=False):
        box = [(high - low, "c0", f"half of the steps: {low} to {high}")]
        marks = [(middle, "ink", f"median {middle}"), (widest, "c1", f"widest {widest}")]
        rows.append(Bar(f"{point.number} {point.name}", f"median {middle}", box, marks, start=low))
    picture = bars(title, rows, axis, short, "positions")
    table = ["#", "setting", "a quarter", "median", "three quarters", "widest"], [
        [str(point.number), point.name, *map(str, values)]
        for (point, _), values in zip(pairs, quantiles, strict=True)
    ]  # fmt: skip
    legend = (("c0", "half of the steps"), ("ink", "median"), ("c1", "widest"))
    return Section(title, _with_rest(meaning, pairs), picture, legend, table)


def _step_times(study: Study) -> Iterator[Section]:
    title, meaning = "Time of a step by part", "Milliseconds on the device, as scripts/bench.sh measures them"
    if not study.benches:
        absent = "No bench lies in this folder; scripts/bench.sh PROFILE RUN --output FOLDER/bench.json writes one."
        yield Section(title, meaning, absent=absent)
    for path, bench in study.benches:
        known = bench["conditions"]
        facts = known if isinstance(known, str) else _listed(known)
        yield _step_time(title, meaning, (f"{path}: {facts}",), bench)
        if bench.get("steps"):
            yield _whole_steps(bench["steps"])


def _step_time(title: str, meaning: str, where: tuple[str, ...], bench: Mapping[str, Any]) -> Section:
    shapes = bench["shapes"]
    if not shapes:
        return Section(title, meaning, absent=f"{where[0]}: no single steps were timed.")
    known = [(key, name) for key, name in _PARTS if any(shape.get(key) for shape in shapes)]
    names = [name for _, name in known]
    rows = [_shape_bar(shape, known) for shape in shapes[:_MOST_BARS]]
    longest = max(max(shape["device_ms"], sum(shape.get(key) or 0 for key, _ in known)) for shape in shapes)
    picture = bars(title, rows, ticks(0, longest, 5), short, "ms")
    legend = (*_part_legend(names), ("c5", "the rest" if names else "device"), ("ink", "floor"))
    headings = ["rows", "window", *(name for _, name in _PARTS), "device ms", "call ms", "weight floor", "matrix floor"]
    keys = [*(key for key, _ in _PARTS), "device_ms", "call_ms", "weight_floor_ms", "matrix_floor_ms"]
    cells = [
        [str(shape["rows"]), str(shape["width"]), *(number(shape.get(key), 3) for key in keys)] for shape in shapes
    ]
    meaning += "; the floor is what reading the weights or multiplying takes at least."
    meaning += "" if names else " This engine does not tell its layers and its head apart."
    return Section(title, meaning, picture, legend, (headings, cells), where)


def _shape_bar(shape: Mapping[str, Any], known: Sequence[tuple[str, str]]) -> Bar:
    """A step of so many rows; what its parts leave of the whole is the rest."""
    parts = [
        (shape.get(key) or 0.0, colour(place), f"{name} {number(shape.get(key), 3)} ms")
        for place, (key, name) in enumerate(known)
    ]
    rest = shape["device_ms"] - sum(part[0] for part in parts)
    if rest > 0:
        parts.append((rest, "c5", f"the rest {rest:.3f} ms"))
    floor = max(shape.get("weight_floor_ms") or 0, shape.get("matrix_floor_ms") or 0)
    name = f"{shape['rows']} x {shape['width']} positions"
    return Bar(name, f"{shape['device_ms']:.2f} ms", parts, [(floor, "ink", f"floor {floor:.3f} ms")])


def _whole_steps(steps: Sequence[Mapping[str, Any]]) -> Section:
    title = "Time of a whole step by part"
    meaning = (
        "Medians of decoding steps with scripted predictions, under the same conditions, by how many tokens a step "
        "accepts. Forward holds the device's time, the others are the host's."
    )
    rows = []
    for section in steps[:_MOST_BARS]:
        medians = section["median_ms"]
        parts = [
            (medians.get(part) or 0.0, colour(place), f"{part} {number(medians.get(part), 3)} ms")
            for place, part in enumerate(_HOST_PARTS)
        ]
        rows.append(Bar(f"{section['accepted']} accepted a step", f"{medians['step']:.2f} ms", parts))
    axis = ticks(0, max(section["median_ms"]["step"] for section in steps), 5)
    headings = ["accepted", *(part.replace("_", " ") for part in _STEP_PARTS)]
    cells = [
        [str(section["accepted"]), *(number(section["median_ms"].get(part), 3) for part in _STEP_PARTS)]
        for section in steps
    ]
    picture = bars(title, rows, axis, short, "ms")
    return Section(title, meaning, picture, _part_legend(_HOST_PARTS), (headings, cells))


def _part_legend(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((colour(place), name) for place, name in enumerate(names))


def _listed(facts: Mapping[str, Any]) -> str:
    """Conditions of a bench as text."""
    words = []
    for key, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{name.replace('_', ' ')} {one}" for name, one in value.items())
        if value is not None and key != "output":
            words.append(f"{key.replace('_', ' ')} {value}")
    return "; ".join(words)


def _curves(study: Study, free: tuple[str, ...] = ()) -> list[Curve]:
    """All measured points. Without `free`, what varies is k, or where that does not, the thresholds."""
    curves = []
    for series in study.series:
        varying = (
            keys for keys in ((_K,), _THRESHOLDS) if any(len(one) > 1 for one in _grouped(series.measured, keys))
        )
        own = free or next(varying, ())
        groups = _grouped(series.measured, own)
        firsts = [group[0][0] for group in groups]
        named = [key for key in differing(firsts) if key not in own]
        for group in groups:
            settings = ", ".join(f"{key} {group[0][0].decode.get(key)}" for key in named[:3])
            name = f"{series.name}: {settings}" if settings and len(study.series) > 1 else settings or series.name
            curves.append(Curve(name, tuple(sorted(group, key=lambda pair: _tpf(pair[1])))))
    return curves


def _grouped(pairs: Sequence[tuple[Point, Metrics]], free: Sequence[str]) -> list[list[tuple[Point, Metrics]]]:
    groups: dict[str, list[tuple[Point, Metrics]]] = {}
    for point, metrics in pairs:
        fixed = {key: value for key, value in point.decode.items() if key not in free}
        groups.setdefault(json.dumps([fixed, point.workload], sort_keys=True), []).append((point, metrics))
    return [*groups.values()]


def _scored(curve: Curve) -> Curve:
    return Curve(curve.name, tuple(pair for pair in curve.pairs if pair[1]["accuracy"] is not None))


def _over_k(curve: Curve) -> Curve:
    """Rows by k; without `auto`, which is one number on this device and another on that."""
    pairs = [pair for pair in curve.pairs if isinstance(pair[0].decode.get(_K), int)]
    return Curve(curve.name, tuple(sorted(pairs, key=lambda pair: pair[0].decode[_K])))


def _mark(point: Point, curve: Curve) -> str:
    """What a point is called in the picture: its k where that is what varies, else its number in the table."""
    counts = [other.decode.get(_K) for other, _ in curve.pairs]
    varies = None not in counts and len(set(counts)) == len(counts) > 1
    return f"k={point.decode[_K]}" if varies else str(point.number)


def _rates(metrics: Metrics) -> Mapping[str, Any]:
    rates: Mapping[str, Any] = metrics["tps"]["effective"]["with_first_step"]
    return rates


def _quantiles(windows: Mapping[str, int]) -> tuple[int, int, int, int]:
    """Widths of steps by length: a quarter, the median, three quarters, the widest."""
    lengths = sorted((int(length), count) for length, count in windows.items())
    total = sum(count for _, count in lengths)
    ends = list(itertools.accumulate(count for _, count in lengths))
    low, middle, high = (
        next(length for (length, _), end in zip(lengths, ends, strict=True) if end >= share * total)
        for share in (0.25, 0.5, 0.75)
    )
    return low, middle, high, lengths[-1][0]


def _branch(number: int) -> str:
    return "anchor" if number == 0 else f"B{number}"


def _shade(branch: int) -> str:
    return "rest" if branch == 0 else f"b{min(branch, 4)}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _with_rest(meaning: str, pairs: Sequence[Any]) -> str:
    return meaning if len(pairs) <= _MOST_BARS else f"{meaning} The first {_MOST_BARS}; the table has all."


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as 1-3, 7."""
    parts: list[str] = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        own = [number for _, number in run]
        parts.append(str(own[0]) if len(own) == 1 else f"{own[0]}-{own[-1]}")
    return ", ".join(parts)
