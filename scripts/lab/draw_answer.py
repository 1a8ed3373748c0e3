"""Draw the README's moving picture of an answer being filled, from what `lopa trace` recorded of one.

python scripts/lab/draw_answer.py [--trace t.json] [--results docs/results] [--out docs/pictures]

--trace: a file of `lopa trace --json`, which is first made the result file docs/results/answer.json. A picture is an
SVG whose tokens appear pass by pass, over and over; readers who want no motion see the whole answer.
"""

from __future__ import annotations

import argparse
import html
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

from draw_results import ROOT, THEMES, Theme

PASS_S, REST_S = 1.0, 4.0  # a pass, and the whole answer before all begins again
LETTER, LINE, LEFT, TOP = 8.43, 27.0, 14.0, 56.0
STYLE = """
text {{ font: 14px ui-monospace, "DejaVu Sans Mono", monospace; fill: {text}; white-space: pre; }}
.about {{ font: 13px system-ui, "DejaVu Sans", sans-serif; fill: {faint}; }}
.mask {{ fill: {faint}; }} .won rect {{ stroke: {second}; stroke-width: 1.6; }}
.token rect {{ fill: {first}; fill-opacity: 0.13; }}
"""


def answer_of(trace: dict[str, Any]) -> dict[str, Any]:
    """Return what a picture needs. passes: of each filled token its place in the answer, its text, and whether the
    winning lookahead had tried it."""
    passes = []
    for event in trace["events"]:
        start, length = event["prompt_length"], trace["answer"]["length"]
        filled = [[at - start, text, rank < event["num_won"]] for rank, (at, _, text, _) in enumerate(event["filled"])]
        passes.append(sorted(token for token in filled if token[0] < length - 1))  # without the end token
    about = {key: trace[key] for key in ("model", "prompt")}
    return {**about, "num_lookahead": trace["settings"]["num_lookahead"], "passes": passes}


def draw(answer: dict[str, Any], theme: Theme) -> str:
    passes = answer["passes"]
    total = len(passes) * PASS_S + REST_S
    tokens, width, height = _tokens(passes)
    parts = [*_captions(passes, sum(map(len, passes))), *tokens]
    rules = [rule for number in range(len(passes)) for rule in _rules(number, len(passes), total)]
    still = "@media (prefers-reduced-motion: reduce) { * { animation: none !important; } }"
    style = "\n".join([STYLE.format(**theme._asdict()), *rules, still])
    size = f'viewBox="0 0 {max(width, 560) + LEFT:.0f} {height + 16:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{style}\n</style>'
    return "\n".join([head, *parts, "</svg>", ""])


def _tokens(passes: list[list[Any]]) -> tuple[list[str], float, float]:
    """The tokens in the answer's order, each over its mask; how far they reach."""
    parts, x, y, right = [], LEFT, TOP, LEFT
    for _, text, is_won, number in sorted((*token, number) for number, own in enumerate(passes) for token in own):
        shown = text.rstrip("\n")
        width = max(1, len(shown)) * LETTER
        box = f'x="{x:.1f}" y="{y - 16:.1f}" width="{width:.1f}" height="21" rx="3"'
        letters = f'<text x="{x:.1f}" y="{y:.1f}">{html.escape(shown)}</text>'
        parts.append(f'<rect class="mask m{number}" {box}/>')
        parts.append(f'<g class="token{" won" * is_won} p{number}"><rect {box}/>{letters}</g>')
        right = max(right, x + width)
        x, y = (LEFT, y + LINE) if text.endswith("\n") else (x + width + 2, y)
    return parts, right, y


def _captions(passes: list[list[Any]], num_tokens: int) -> list[str]:
    """One for each pass, of which one is seen at a time."""
    counts = accumulate(map(len, passes))
    said = (f"pass {number} of {len(passes)}: {count} of {num_tokens} tokens" for number, count in enumerate(counts, 1))
    explained = "outlined: what the winning lookahead had tried"
    return [
        f'<text class="about c{number}" x="{LEFT}" y="26">{text}; {explained}</text>'
        for number, text in enumerate(said)
    ]


def _rules(number: int, num_passes: int, total: float) -> list[str]:
    """The animations of a pass: its tokens appear, the masks in their place go, its caption is seen until the next."""
    begin = 100 * number * PASS_S / total
    is_last = number == num_passes - 1
    end = 100 if is_last else 100 * (number + 1) * PASS_S / total
    seen = [(0, 0), (begin, 0), (begin + 0.01, 1), (100, 1)]
    captions = [*seen[:3], (end, 1), *([] if is_last else [(end + 0.01, 0), (100, 0)])]
    return [
        _animation(f"p{number}", seen, 1, total),
        _animation(f"m{number}", [(at, (1 - opacity) / 4) for at, opacity in seen], 0, total),
        _animation(f"c{number}", captions, int(is_last), total),
    ]


def _animation(name: str, frames: list[tuple[float, float]], still: float, total: float) -> str:
    """A class of this name: opacity by per cent of the whole time, and what it is without motion."""
    told = " ".join(f"{at:.2f}% {{ opacity: {opacity:g} }}" for at, opacity in frames)
    return f"@keyframes {name} {{ {told} }}\n.{name} {{ opacity: {still:g}; animation: {name} {total:g}s infinite; }}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    options = parser.parse_args()
    kept = options.results / "answer.json"
    if options.trace is not None:
        made = answer_of(json.loads(options.trace.read_text(encoding="utf-8")))
        kept.write_text(json.dumps(made, ensure_ascii=False) + "\n", encoding="utf-8")
    answer = json.loads(kept.read_text(encoding="utf-8"))
    for theme in THEMES:
        (options.out / f"answer_{theme.name}.svg").write_text(draw(answer, theme), encoding="utf-8")


if __name__ == "__main__":
    main()
