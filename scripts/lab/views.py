"""Rows and columns of tables of docs/results, where a page does not need all of them: `NAME/short` of tables.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class View:
    """What of a table stands on a page."""

    columns: Mapping[str, str]
    "Headings that are kept, in this order, with what the page calls them."
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    "What cells under a heading may say in the rows that are kept."
    conditions: str | None = None
    "What is said above, after card and commit, in the place of the table's conditions and command."
    words: Mapping[str, str] = field(default_factory=dict)
    "Cells in the page's words."


VIEWS: Mapping[str, View] = {
    "estimate_ascend/paper": View(
        {name: name for name in ("step", "measured, or by ascend_910c", "by ascend_910c_msmodeling")},
        where={"step": ("measured, MBPP", "measured, GSM8K", "estimated", "all-reduces by AI_CPU")},
        conditions="ms a step: measured is TPF / TPS of LoPA-Dist-Ascend (arXiv 2512.16229, S18), estimated the same "
        "setting: TP4 x BP4, W8A8, k = 3, blocks of 32",
    ),
    "soak_cpu/server": View(
        {
            **{name: name for name in ("fault", "times")},
            "in": "requests",
            **{name: name for name in ("answered", "refused", "failed", "left", "lost", "doubled", "wrong")},
        },
        where={"fault": ("kill -9 of all replicas", "all")},
        conditions="2.00 hours, the demo on two replicas",
    ),
    "pace_h200": View(
        {"setting": "setting", **{f"{n} at once": f"{n} at once" for n in (1, 4, 16, 64)}},
        where={"setting": ("k3", "k0_in_turn", "balanced", "fast")},
        conditions="Tokens/s of all requests together: Dream-7B's shapes in bf16 with random weights, answers of the "
        "demo model accepted",
    ),
    "load_7b_h200": View(
        {name: name for name in ("requests at once", "k", "tokens/s", "TPF", "tokens a pass", "ms a step")},
        where={"k": ("0", "3")},
        conditions="Dream-7B's shapes in bf16; the demo model answers in the place of random weights, outside of every "
        "clock",
    ),
    "records_h100": View(
        {
            name: name
            for name in ("public figure", "its tokens/s", "its TPF", "ours, tokens/s", "our TPF", "ours / its")
        },
        where={
            "public figure": (
                "d3LLM-LLaDA-8B, H100, one request",
                "d3LLM-Dream-7B, H100, one request",
                *(f"LLaDA2.1-mini, H20, {n} at once" for n in (1, 32, 128)),
                "SDAR-4B (JetEngine), H200, 128 at once",
            )
        },
        conditions="Random weights of the model's true shapes in bf16, k = 0. A claim is its authors', on their "
        "hardware, tasks and timing. Random weights send all masks to the same experts, so at few requests LLaDA2's "
        "passes read less than a trained model's",
    ),
    "records_h200": View(
        {
            **{name: name for name in ("public figure", "its tokens/s", "its TPF")},
            "ours": "ours in",
            "our TPF": "our TPF",
            "tokens/s, different tokens": "ours, tokens/s",
            "different / its": "ours / its",
        },
        conditions="LLaDA2-mini's shapes with random weights, one request. Random weights send all masks to the same "
        "experts, so ours is timed on 32 different tokens, which hit three fifths of every layer's experts",
    ),
    "replicas_h200x4/killed": View(
        {
            name: name
            for name in ("replicas", "requests", "answered", "ended with an error", "seconds to the last error")
        },
        where={"run": ("dream_7b_dummy",)},
        conditions="Dream-7B's shapes; one replica is killed while each has 64 streams under way and as many wait",
    ),
    "wall_clock_h100/chosen": View(
        {
            "at once": "requests at once",
            "chosen": "fastest setting",
            "tokens/s": "tokens/s",
            "over as accurate k = 0": "over the fastest without lookahead",
        },
        conditions="Passes of Dream-7B's shapes in bf16 with random weights are timed, models/demo answers. Settings "
        "within 1 point of the most accurate one without lookahead",
        words={
            "hedged, k = 3, entropy 8": "k = 3 lookaheads",
            "hedged, k = 2, entropy 4": "k = 2 lookaheads",
            "k = 0, blocks of 8, opens at 1": "no lookahead, short blocks one by one",
        },
    ),
}
