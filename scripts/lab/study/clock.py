"""Make a table of the sweep `wall_clock` and the loads of its rows: accuracy beside tokens a second at each load.

python -m scripts.lab.study.clock MATH CODE LOADS... --to docs/results/NAME.json [--commit COMMIT]

MATH, CODE: result folders of `lopa evaluate demo wall_clock` and `lopa evaluate demo_code wall_clock`. LOADS: files of
`lopa bench load dream_7b_dummy --answers demo --sweep wall_clock --output FILE`.

For each load the fastest setting is chosen on the first half of the problems, among those at most one point less
accurate than the most accurate setting without lookahead there, and told with what it does on the other half.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config import slug
from scripts.lab.study.bootstrap import difference, in_percent, in_points, paired_interval

MOST_LOST = 0.01  # of accuracy
Rights = Mapping[str, Sequence[bool]]  # of each setting, a value a problem, in one order


def rights_of(folder: Path) -> Rights:
    """Return which problems each setting solved. Raises ValueError if settings have different problems."""
    names = [row["name"] for row in json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["rows"]]
    found, ids = {}, None
    for name in names:
        lines = (folder / f"{slug(name)}.jsonl").read_text(encoding="utf-8").splitlines()
        correct = {record["id"]: bool(record.get("correct")) for record in map(json.loads, lines)}
        ids = ids or sorted(correct)
        if sorted(correct) != ids:
            raise ValueError(f"{folder}: {name!r} has other problems than {names[0]!r}: run the sweep to its end")
        found[name] = [correct[each] for each in ids]
    return found


def careful(rights: Rights) -> str:
    """Return the most accurate setting without lookahead."""
    return max((name for name in rights if name.startswith("k = 0")), key=lambda name: sum(rights[name]))


def fastest(rights: Rights, speed: Mapping[str, float]) -> str:
    """Return the fastest setting that loses at most `MOST_LOST` against the careful one."""
    best = rights[careful(rights)]
    least = sum(best) / len(best) - MOST_LOST
    return max((name for name in speed if sum(rights[name]) / len(rights[name]) >= least), key=speed.__getitem__)


def halves(math: Rights, code: Rights) -> tuple[Rights, Rights]:
    """Return both halves of the problems, math and code together."""

    def half(place: int) -> Rights:
        return {name: [*_half(math[name], place), *_half(code[name], place)] for name in math}

    return half(0), half(1)


def _half(rights: Sequence[bool], place: int) -> Sequence[bool]:
    middle = len(rights) // 2
    return rights[middle:] if place else rights[:middle]


def chosen(math: Rights, code: Rights, loads: Mapping[int, Mapping[str, float]]) -> list[list[Any]]:
    """Return a row a load: the setting chosen on one half of the problems, its speed, that of the fastest setting
    without lookahead that is as accurate, of LoPA's faster one, and its accuracy on the other half against the careful
    setting, in points."""
    first, other = halves(math, code)
    rows: list[list[Any]] = []
    for at_once, speed in loads.items():
        name = fastest(first, speed)
        plain = fastest(first, {each: value for each, value in speed.items() if each.startswith("k = 0")})
        lopa = max(value for each, value in speed.items() if each.startswith("LoPA") and "entropy" not in each)
        lost = paired_interval(*([float(x) for x in other[each]] for each in (name, careful(first))), difference)
        rows.append([str(at_once), name, speed[name], speed[name] / speed[plain], speed[name] / lopa, in_points(lost)])
    return rows


def table_of(math: Rights, code: Rights, tpf: Mapping[str, Sequence[float]], loads: Mapping[int, Mapping[str, float]],
             computed: Mapping[str, float]) -> list[list[Any]]:  # fmt: skip
    """Return a row a setting: accuracy and TPF of both kinds, tokens filled a token computed, tokens a second."""
    return [
        [name, in_percent(math[name]), tpf[name][0], in_percent(code[name]), tpf[name][1], computed.get(name)]
        + [speed.get(name) for speed in loads.values()]
        for name in math
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("math", type=Path)
    parser.add_argument("code", type=Path)
    parser.add_argument("loads", type=Path, nargs="+")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--commit")
    known = parser.parse_args()
    files = [json.loads(path.read_text(encoding="utf-8")) for path in known.loads]
    loads: dict[int, dict[str, float]] = {}
    for load in sorted((load for file in files for load in file["loads"]), key=lambda load: load["at_once"]):
        loads.setdefault(load["at_once"], {})[load["setting"]] = load["tokens_per_s"]
    alone = [load for file in files for load in file["loads"] if load["at_once"] == 1]
    computed = {load["setting"]: load["tokens_per_pass"] / load["tokens_of_pass"] for load in alone}
    boards = [json.loads((folder / "sweep.json").read_text(encoding="utf-8")) for folder in (known.math, known.code)]
    tpf: dict[str, list[float]] = {}
    for board in boards:
        for row in board["rows"]:
            tpf.setdefault(row["name"], []).append(row["metrics"]["tpf"]["effective"]["per_request_mean"])
    math, code = rights_of(known.math), rights_of(known.code)
    head = {"card": files[0]["conditions"]["device"], "commit": known.commit}
    speeds = [[f"tokens/s, {at_once} at once", ",.0f"] for at_once in loads]
    methods = {
        **head,
        "conditions": f"Accuracy and TPF: models/demo in bf16 on {len(next(iter(math.values())))} held-out math and "
        f"{len(next(iter(code.values())))} code problems, 350 at once. Tokens/s: passes of Dream-7B's shapes in bf16 "
        "with random weights, timed, while the demo model answers math prompts of some 60 tokens outside of the clock. "
        "Blocks of 16 unless said; a block opens when the one before it is filled to 0.1 unless said; tau 0.98 and "
        "shift_row fresh, but LoPA's tau 0.95 and stale. Use: tokens filled a token computed, one request",
        "command": "lopa bench load dream_7b_dummy --answers demo --sweep wall_clock --profile h200_tp1_bp1",
        "columns": [["setting", ""], ["math", ""], ["TPF", ".2f"], ["code", ""], ["TPF", ".2f"], ["use", ".3f"],
                    *speeds],
        "rows": table_of(math, code, tpf, loads, computed),
    }  # fmt: skip
    best = {
        **head,
        "conditions": "Dream-7B's shapes in bf16 with random weights: its passes are timed, models/demo answers. "
        "Chosen on one half of the demo's 1,000 problems: the fastest setting at most 1 point less accurate than the "
        "most accurate one without lookahead. Ratios of tokens/s: over the fastest as accurate setting without "
        "lookahead, over LoPA's faster k. Accuracy: on the other half, against the most accurate, 95 % of paired "
        "resamples",
        "columns": [["at once", ""], ["chosen", ""], ["tokens/s", ",.0f"], ["over as accurate k = 0", ".2f"],
                    ["over LoPA", ".2f"], ["accuracy, points", ""]],
        "rows": chosen(math, code, loads),
    }  # fmt: skip
    known.to.write_text(json.dumps({"tables": {"methods": methods, "chosen": best}}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
