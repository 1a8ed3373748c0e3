"""Write docs/results/estimate_ascend.json: what `lopa estimate` says of the Ascend engine, by each file of figures.

python -m scripts.lab.estimate_ascend

No device is needed and nothing is measured but what the paper published. `scripts.lab.tables` makes tables of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.bench.estimate.cost import StepCost, estimate_step
from common.bench.estimate.hardware import Hardware, load_hardware
from common.bench.estimate.scenario import Options, changes, setup_of
from common.bench.estimate.setup import Setup
from common.checkpoint import load_model_config
from common.config import find_config, load_profile, load_run
from graphs.hccl import DETERMINISTIC
from scripts.lab.tables import RESULTS

FIGURES = ("ascend_910c", "ascend_910c_msmodeling")
_PROFILE = "ascend_910c_tp4_bp4"
# LoPA, arXiv 2512.16229: D2F-Dream-Base, setting S18 (blocks of 32, k = 3), W8A8, TP4 x BP4. (tokens/s, tokens a pass)
_PAPER = {"MBPP": (1073.86, 11.92), "GSM8K": (856.46, 9.34)}
_ORDERS = ("true", "false")  # HCCL_DETERMINISTIC

Table = Mapping[str, Any]


def made() -> dict[str, Any]:
    """Return the result file."""
    figures = [load_hardware(name) for name in FIGURES]
    return {
        "tables": {
            "figures": _figures(figures),
            "parts": _parts(figures),
            "changes": _changes(figures),
            "paper": _paper(figures),
        }
    }


def _setup(run: str, *settings: str, **options: Any) -> Setup:
    profile, loaded = load_profile(find_config("profiles", _PROFILE)), load_run(find_config("runs", run), settings)
    return setup_of(profile, loaded, load_model_config(loaded.model), Options(**options))


def _as_first_written(setup: Setup) -> Setup:
    """The step before this table had a reason: gate and up to int32, five kernels before attention, events before the
    replay."""
    launches = setup.launches.rotating(in_one_kernel=False).activating(in_one_kernel=False)
    return replace(setup, launches=launches, length_events="before")


def _summing(setup: Setup, is_in_one_order: str) -> Setup:
    assert setup.hccl is not None
    return replace(setup, hccl={**setup.hccl, DETERMINISTIC: is_in_one_order})


def _figures(figures: Sequence[Hardware]) -> Table:
    """Where the files differ."""
    own, other = (dict(hardware.figures()) for hardware in figures)
    rows = []
    for name in sorted(own.keys() | other.keys()):
        values = [found[name].value if name in found else None for found in (own, other)]
        if values[0] != values[1]:
            ratio = values[1] / values[0] if values[0] and values[1] else None
            rows.append([name, *values, ratio])
    columns = [["figure", ""], *([name, ",g"] for name in FIGURES), ["ratio", ".2f"]]
    return {"columns": columns, "rows": rows}


def _parts(figures: Sequence[Hardware]) -> Table:
    after = _setup("dream_7b_dummy")
    steps = [
        estimate_step(_summing(setup, value), hardware)
        for hardware in figures
        for setup in (_as_first_written(after), after)
        for value in _ORDERS
    ]
    names = [part.part for part in steps[0].parts]
    rows = [[name, *(_ms_of(step, name) for step in steps)] for name in names]
    headings = [f"{when}, {value}" for when in ("before", "after") for value in _ORDERS]
    return {
        "conditions": f"`lopa estimate dream_7b_dummy --profile {_PROFILE}`, ms: {after.rows} rows of {after.window} "
        "on each device. Before: five kernels in front of attention, gate and up as int32, events before the replay. "
        f"true, false: {DETERMINISTIC}. The first four columns by {FIGURES[0]}, the others by {FIGURES[1]}",
        "columns": [["part", ""], *([heading, ".2f"] for heading in headings * 2)],
        "rows": [*rows, ["step", *(step.ms for step in steps)]],
    }


def _ms_of(step: StepCost, name: str) -> float:
    return sum(part.seconds for part in step.parts if part.part == name) * 1e3


def _changes(figures: Sequence[Hardware]) -> Table:
    """What each change brings for one request and for four."""
    columns: list[dict[str, float]] = []
    steps = []
    for run in ("dream_7b_dummy", "first_910c"):
        for hardware in figures:
            setup = _summing(_setup(run), "false")
            base = estimate_step(setup, hardware).ms
            found = changes(setup, hardware)
            columns.append({name: estimate_step(other, faster).ms - base for name, other, faster in found})
            steps.append(f"{base:.2f}")
    names = sorted({name for column in columns for name in column}, key=lambda name: columns[0].get(name, 0.0))
    headings = [f"{requests}, {name}" for requests in ("1 request", "4 requests") for name in FIGURES]
    return {
        "conditions": f"{_PROFILE} with {DETERMINISTIC} false, Dream-7B's shapes, k = 7: ms of a step, and what it "
        "takes longer with one thing done otherwise",
        "columns": [["", ""], *([heading, "+.2f"] for heading in headings)],
        "rows": [["the step", *steps], *([name, *(column.get(name) for column in columns)] for name in names)],
    }


def _paper(figures: Sequence[Hardware]) -> Table:
    """The paper's step beside the estimate of exactly its setting, and what could make up the difference."""
    k3 = ("decode.num_lookahead=3", "decode.block_size=32", "decode.max_new_tokens=512")
    setup = _summing(_setup("dream_7b_dummy", *k3, tokens_per_step=_PAPER["MBPP"][1]), "false")
    launches = setup.launches
    apart = launches.rotating(in_one_kernel=False).activating(in_one_kernel=False)
    plain = replace(apart, fuses_norm_quant=False)
    before = replace(setup, length_updates="before", length_events="before")
    narrow = replace(setup, window=64)
    variants = [
        ("estimated", setup),
        ("all-reduces by AI_CPU", _summing(setup, "true")),
        ("lengths and events before the replay", before),
        ("norms, rotation and SwiGLU in kernels of their own", replace(setup, launches=plain)),
        ("the whole window through the head", replace(setup, read_share=1.0)),
        ("these last three together", replace(before, launches=plain, read_share=1.0)),
        ("launched one by one", replace(setup, is_captured=False)),
        ("a window of 64, sums in any order", narrow),
        ("a window of 64, sums in one order", _summing(narrow, "true")),
    ]
    rows: list[list[Any]] = [
        [f"measured, {name}", per_pass / per_second * 1e3, None] for name, (per_second, per_pass) in _PAPER.items()
    ]
    rows += [[name, *(estimate_step(variant, hardware).ms for hardware in figures)] for name, variant in variants]
    return {
        "conditions": f"ms a step: measured is TPF / TPS of LoPA-Dist-Ascend (arXiv 2512.16229, S18). Estimated: "
        f"TP4 x BP4, W8A8, k = 3, blocks of 32, {setup.rows} row of {setup.window} on each device after {setup.prefix} "
        "cached positions, sums in any order; below it the same with one thing otherwise",
        "columns": [["step", ""], ["measured, or by " + FIGURES[0], ".1f"], ["by " + FIGURES[1], ".1f"]],
        "rows": rows,
    }


if __name__ == "__main__":
    text = json.dumps(made(), indent=1, ensure_ascii=False)
    (RESULTS / "estimate_ascend.json").write_text(f"{text}\n", encoding="utf-8")
