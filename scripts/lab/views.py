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


def _same(*names: str) -> dict[str, str]:
    """Return columns that the page calls as the table does."""
    return {name: name for name in names}


def _replayed(of: str, command: str) -> View:
    """A pace's table at fewer loads."""
    return View(
        _same("setting", *(f"{n} at once" for n in (1, 4, 16, 64, 256)), "rising and falling", "least"),
        conditions=f"Tokens/s, replayed. {of}. Pass times: Dream-7B's shapes, one H100, from docs/results/"
        f"methods_demo.json. Least: the lowest share of a pace's fastest way, at any load, those of the result file "
        f"too. `python -m scripts.lab.pace {command}`",
    )


_METHODS = View(
    _same("setting", "right, %", "against k = 0", "tokens a pass", *(f"tokens/s, {n} at once" for n in (1, 4, 16)))
)

VIEWS: Mapping[str, View] = {
    "pace/speeds": _replayed(
        "demo in float32 on the first 150 held-out math and 150 code problems, decoded at f381368",
        "outputs/pace/math outputs/pace/code",
    ),
    "pace_plain/speeds": _replayed(
        "demo_plain in float32 on the first 200 held-out math and 200 code problems, decoded at a40dbcd",
        "outputs/pace_plain/math outputs/pace_plain/code --to docs/results/pace_plain.json",
    ),
    **dict.fromkeys(("methods_demo/math", "methods_demo/code", "methods_plain/math", "methods_plain/code"), _METHODS),
    "structured_demo": View(
        _same("held to", "correct", "ended", "tokens", "passes"),
        where={"k": (7,)},
        conditions="The first 100 held-out math problems, models/demo, k = 7. Ended: before the canvas was full. "
        "Tokens, passes: means of an answer",
    ),
    "estimate_h200": View(
        _same("engine", "rows x window", "measured ms", "predicted ms", "error"),
        where={"rows x window": ("1 x 64", "4 x 64", "8 x 64")},
        conditions="Dream-7B's shapes, prefix 1,024; measured at 5237505 (one GPU), 655a190 (bp 2) and 2563bfe (tp "
        "2), predicted with figures from other rows but for a sum's latency of tp 2, which is from 1 x 64",
    ),
    "wide_h200": View(
        _same("linear", "128 tokens", "192", "256", "320"),
        where={"linear": ("bf16 gate/up", "bf16 down", "fp8 gate/up", "int8 gate/up")},
        conditions="Dream-7B's linears, us with the stage after them. bf16 and int8 at commit a41e08e; fp8 at b242034",
    ),
    "cases_h200": View(
        _same("case", "ms", "over the floor"),
        where={
            "case": (
                "one GPU, 1 x 64",
                "one GPU, 8 x 64",
                "one GPU in fp8 with its head, 1 x 64",
                "one GPU, a prompt of 1,040 tokens, whole step",
                "bp 2, one row a GPU, 1 x 64",
                "tp 2, 1 x 64",
            )
        },
        conditions="Dream-7B's shapes, random weights, bf16 unless it says otherwise, 1,024 positions cached; medians. "
        "`1 x 64`: one row with a window of 64. Floor: the longer of reading every weight once and multiplying by it",
    ),
    **{
        name: View(
            {
                "mesh": "mesh",
                "step, ms": "ms a step",
                "tokens/s, TPF 10.7": "tokens/s at TPF 10.7",
                "tokens/s, TPF 15.1": "tokens/s at TPF 15.1",
            },
            where={"mesh": meshes},
            conditions=said,
        )
        for name, meshes, said in (
            (
                "meshes_h200x2",
                ("one GPU", "tp 2", "bp 2", "one GPU, fp8", "tp 2, fp8"),
                "Dream-7B's shapes, random weights, k = 3, 1,024 positions cached. Tokens/s of one request of 256 "
                "tokens, with the pass of its prompt; step: median at a window of 64",
            ),
            ("meshes_h200x4/decodes", ("tp 4", "bp 4", "bp 2 x tp 2", "bp 2 x tp 2, fp8"), "The same, older kernels"),
        )
    },
    "estimate_ascend/paper": View(
        _same("step", "measured, or by ascend_910c", "by ascend_910c_msmodeling"),
        where={"step": ("measured, MBPP", "measured, GSM8K", "estimated", "all-reduces by AI_CPU")},
        conditions="ms a step: measured is TPF / TPS of LoPA-Dist-Ascend (arXiv 2512.16229, S18), estimated the same "
        "setting: TP4 x BP4, W8A8, k = 3, blocks of 32",
    ),
    "start_h200": View(
        {
            "start": "start",
            "graphs": "graphs",
            "their capture, s": "their capture, s",
            "ready after, s": "ready after, s",
            "first answer, s": "first answer, s",
        },
        conditions="A server of Dream-7B's shapes, random weights, bf16, k = 7, for up to 16 requests at once; answers "
        "of 256 tokens in 164 passes",
    ),
    "soak_cpu/server": View(
        {
            **_same("fault", "times"),
            "in": "requests",
            **_same("answered", "refused", "failed", "left", "lost", "doubled", "wrong"),
        },
        where={"fault": ("kill -9 of all replicas", "all")},
        conditions="2.00 hours, the demo on two replicas",
    ),
    "pace_h200": View(
        _same("setting", *(f"{n} at once" for n in (1, 4, 16, 64))),
        where={"setting": ("k3", "k0_in_turn", "balanced", "fast")},
        conditions="Tokens/s of all requests together: Dream-7B's shapes in bf16 with random weights, answers of the "
        "demo model accepted",
    ),
    "records_h200": View(
        _same(
            *("public figure", "its tokens/s", "its TPF", "ours in", "our TPF"),
            *("ours, tokens/s", "at the floor", "ours / its"),
        ),
        where={
            "public figure": (
                *("d3LLM-LLaDA-8B, H100", "d3LLM-Dream-7B, H100", "LoPA-Dream, eight H200s, MBPP"),
                *("LLaDA2.1-mini, quantized, its peak", "DMax-16B, two H200s"),
                *(f"LLaDA2.1-mini, H20, {n} at once" for n in (1, 8, 128)),
                "SDAR-4B (JetEngine), H200, 128 at once",
            )
        },
        conditions="On one H200 at commit 4b161e7, on two at a71882a. Random weights of the models' shapes, k = 0 "
        "unless it says otherwise; what is accepted brings the TPF. Claims are of other hardware, tasks and timing. At "
        "the floor: if a pass took no longer than to read the weights once, or to multiply by them. Random weights "
        "send all masks of a load to the same experts, so at few requests LLaDA2's passes read less than a trained "
        "model's",
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
