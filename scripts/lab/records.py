"""Set published tokens/s beside this engine at the same shapes, on this machine.

python -m scripts.lab.records OUT.json [MODEL ...]

MODEL is a folder of configs/models, with `_tp2` for two GPUs; all of them without `_tp2` if none is given. Rows of
other models that OUT.json has stay there.

One request: its prompt has 1,024 tokens, and a step accepts as many tokens as bring the claim's tokens a pass. Several
requests: the block-diffusion demo model's answers to its held-out problems are accepted.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from scripts.lab.experts import PROFILE, RUN, benched, on_two, written
from scripts.lab.result import card, commit, write

COLUMNS = [
    ["public figure", ""], ["its tokens/s", ",.0f"], ["its TPF", ""], ["ours in", ""], ["our TPF", ".2f"],
    ["ours, tokens/s", ",.0f"], ["at the floor", ",.0f"], ["ours / its", ".1f"], ["commit", ""],
]  # fmt: skip
CONDITIONS = (
    "A claim is its authors', on the hardware, tasks and timing named there. Ours: random weights of the model's "
    "shapes, k = 0 unless it says otherwise. One request: 256 tokens after a prompt of 1,024, whose pass counts, with "
    "as many tokens accepted a step as bring the TPF; of LLaDA2 our TPF over a pass of 32 different tokens, which hit "
    "three fifths of a layer's experts (mask tokens are alike with random weights, and choose the same). Several: "
    "prompts of some 60 tokens, and what the block-diffusion demo model accepts; there LLaDA2's masks are alike, so at "
    "few requests a pass reads less than a trained model's. At the floor, in bf16: if a pass took no longer than to "
    "read the weights once, or to multiply by them"
)


class Claim(NamedTuple):
    """accepted: tokens a step; 0: what the demo model accepts. at_once: requests."""

    name: str
    tokens_per_s: int
    tpf: str | None
    model: str
    quantization: str = "bf16"
    accepted: int = 0
    lookahead: int = 0
    at_once: int = 1


CLAIMS = (
    Claim("d3LLM-LLaDA-8B, H100", 545, "9.91", "llada_8b", accepted=10),
    Claim("d3LLM-Dream-7B, H100", 281, "4.89", "dream_7b", accepted=5),
    Claim("LoPA-Dream, eight H200s, MBPP", 708, "15.55", "dream_7b", accepted=15, lookahead=7),
    Claim("LLaDA2.1-mini, quantized, its peak", 1587, None, "llada2_mini", "w8a8", accepted=6),
    Claim("LLaDA2.1-mini, quantized, its peak", 1587, None, "llada2_mini", "w8a8", accepted=9),
    *(
        Claim(f"LLaDA2.1-mini, H20, {at_once} at once", claimed, None, "llada2_mini", at_once=at_once)
        for at_once, claimed in ((1, 592), (8, 1923), (32, 2853), (64, 3241), (128, 3412))
    ),
    Claim("SDAR-4B (JetEngine), H200, 128 at once", 5000, None, "sdar_4b", at_once=128),
    Claim("DMax-16B, two H200s", 1338, "5.5 to 6.6", "llada2_mini_tp2", accepted=6),
    Claim("DMax-16B, two H200s", 1338, "5.5 to 6.6", "llada2_mini_tp2", "w8a8", accepted=6),
)


def of_one(claims: list[Claim]) -> list[list[Any]]:
    """Return the rows of claims of one request that one run measures."""
    model, quantization, lookahead = claims[0].model, claims[0].quantization, claims[0].lookahead
    is_mixture, rows = _is_mixture(claims[0]), lookahead + 1
    shape = f"{rows}x32" if is_mixture else f"{rows}x64"
    accepted = [str(claim.accepted) for claim in claims]
    run = benched(model, quantization, "--shapes", shape, "--no-mixes", "--accepted", *accepted, lookahead=lookahead)
    (passed,) = run["shapes"]
    floor_ms = max(passed["weight_floor_ms"], passed["matrix_floor_ms"])  # in bf16
    found = []
    for claim, decode in zip(claims, run["steps"], strict=True):
        tpf, per_s = decode["tpf"], decode["tps"]
        if is_mixture:
            per_s = 1000 * tpf / passed["call_ms"]
        found.append(_row(claim, tpf, per_s, 1000 * tpf / floor_ms if quantization == "bf16" else None))
    return found


def of_several(claims: list[Claim]) -> list[list[Any]]:
    """Return the rows of claims of one model at several loads; of a mixture without what would be at the floor, which
    counts the experts that different tokens hit."""
    at_once = [str(claim.at_once) for claim in claims]
    found = written(
        "common.commands", "bench", "load", RUN, "--profile", PROFILE, "--set",
        f"model=configs/models/{claims[0].model}", "--answers", "demo_block", "--lookahead", "0", "--at-once", *at_once,
    )  # fmt: skip
    is_mixture = _is_mixture(claims[0])
    rows = []
    for claim, load in zip(claims, found["loads"], strict=True):
        per_s = load["tokens_per_s"]
        at_floor = None if is_mixture else per_s * load["step_ms"] / load["floor_ms"]
        rows.append(_row(claim, load["tokens_per_pass"], per_s, at_floor))
    return rows


def _is_mixture(claim: Claim) -> bool:
    return claim.model.startswith("llada2")


def _row(claim: Claim, tpf: float, per_s: float, at_floor: float | None) -> list[Any]:
    ours = claim.quantization + (f", k = {claim.lookahead}" if claim.lookahead else "")
    ours += ", two GPUs" if on_two(claim.model) else ""
    claimed = claim.tokens_per_s
    return [claim.name, claimed, claim.tpf, ours, tpf, per_s, at_floor, per_s / claimed, commit()]


def measured(claims: list[Claim]) -> list[list[Any]]:
    return of_one(claims) if claims[0].accepted else of_several(claims)


def main(path: str, *models: str) -> None:
    out, wanted = Path(path), models or {claim.model for claim in CLAIMS if not on_two(claim.model)}
    kept = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    found = {_name(row): row for row in kept}
    chosen = [claim for claim in CLAIMS if claim.model in wanted]
    for _, group in groupby(
        chosen, lambda claim: (claim.model, claim.quantization, claim.lookahead, claim.accepted > 0)
    ):
        found |= {_name(row): row for row in measured(list(group))}
        head = {
            "card": f"{card('cuda')}s",
            "conditions": CONDITIONS,
            "command": "python -m scripts.lab.records OUT.json",
        }
        write(out, {**head, "columns": COLUMNS, "rows": list(found.values())})


def _name(row: list[Any]) -> tuple[Any, ...]:
    """Return what tells a row from the others: the claim, ours, and its tokens a pass as asked for."""
    return row[0], row[3], round(row[4])


if __name__ == "__main__":
    main(*sys.argv[1:])
