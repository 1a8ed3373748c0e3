"""Show what the paces bring: every way and every pace at loads of 1 to 256 requests, replayed by measured pass times.

python -m scripts.lab.study.replay decode --run demo --sweep pace --problems 200 --out outputs/pace/math
python -m scripts.lab.study.replay decode --run demo_code --sweep pace --problems 200 --out outputs/pace/code
python -m scripts.lab.pace outputs/pace/math outputs/pace/code     writes docs/results/pace.json

The engine's own `Pacer` runs over the answers of its ways, by the pass times of docs/results/methods_demo.json. On a
GPU, with real passes and real decoding:

lopa bench load dream_7b_dummy --answers demo --sweep pace --profile h200_tp1_bp1 --at-once 1 2 4 8 16 32 64
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from common.config import Pace, load_run, ways_of
from common.decoding import Pacer, PassCosts
from scripts.lab.result import RESULTS, commit, write
from scripts.lab.study.bootstrap import difference, in_percent, in_points, paired_interval
from scripts.lab.study.replay import Answer, Replay, read, read_head, read_pass_times

PACES: tuple[Pace, ...] = get_args(Pace)[1:]
LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CAREFUL = "k0_in_turn"  # what accuracy is held against: no lookahead, one block after another
_LEAST_REQUESTS = 2000
_STRETCH_S = 4.0


def at_load(replay: Replay, at_once: int) -> float:
    """Return tokens a second of so many requests at once."""
    while replay.num_begun < max(_LEAST_REQUESTS, 8 * at_once):
        replay.step(at_once)
    return replay.filled / replay.seconds


def rising(replay: Replay) -> float:
    """Return tokens a second under a load that rises from one request and falls again."""
    levels = (*LOADS, *LOADS[-2::-1])
    while replay.seconds < _STRETCH_S * len(levels):
        replay.step(levels[int(replay.seconds / _STRETCH_S)])
    return replay.filled / replay.seconds


def speeds(kinds: Sequence[dict[str, list[Answer]]], costs: PassCosts) -> list[list[Any]]:
    """Return a row a way and a pace: tokens a second at each load, and under a rising one. kinds: of answers by way."""
    mixed = {way: [answer for pair in zip(*each, strict=True) for answer in pair] for way, each in _by_way(kinds)}

    def row(ways: Sequence[str], pacer: Callable[[], Pacer | None]) -> list[float]:
        def replay() -> Replay:
            return Replay([mixed[way] for way in ways], costs, pacer())

        return [*(at_load(replay(), load) for load in LOADS), rising(replay())]

    fixed = {way: row([way], lambda: None) for way in mixed}
    rows: list[list[Any]] = [[way, *own, None] for way, own in fixed.items()]
    for pace in PACES:
        ways = ways_of(load_run("demo").decode, pace)
        names = [way.name for way in ways]
        own = row(names, partial(Pacer, ways, costs))
        rows.append([pace, *own, float((np.array(own) / np.max([fixed[name] for name in names], axis=0)).min())])
    return rows


def _by_way(kinds: Sequence[dict[str, list[Answer]]]) -> Iterator[tuple[str, list[list[Answer]]]]:
    fewest = min(len(answers) for found in kinds for answers in found.values())
    return ((way, [found[way][:fewest] for found in kinds]) for way in kinds[0])


def accuracy(way: str, kinds: Sequence[dict[str, list[Answer]]]) -> list[Any]:
    """Return a way's row: of each kind of problems the share that is right and what it loses, then tokens a pass."""
    cells: list[Any] = [way]
    for found in kinds:
        right, careful = ([float(answer.right) for answer in found[name]] for name in (way, CAREFUL))
        cells.append(in_percent(right))
        cells.append(in_points(paired_interval(right, careful, difference)))
    both = [answer for found in kinds for answer in found[way]]
    num_passes = sum(len(answer.passes) for answer in both)
    later = [count for answer in both for count in answer.passes[1:]]
    return [*cells, sum(answer.num_tokens for answer in both) / num_passes, float(np.mean(later))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("math", type=Path, help="a folder of answers")
    parser.add_argument("code", type=Path)
    parser.add_argument("--to", type=Path, default=RESULTS / "pace.json", help="the result file")
    known = parser.parse_args()
    ways = list(dict.fromkeys(way.name for pace in PACES for way in ways_of(load_run("demo").decode, pace)))
    kinds = [read(folder, ways) for folder in (known.math, known.code)]
    num = [len(found[CAREFUL]) for found in kinds]
    head = read_head(known.math, CAREFUL)
    where = (
        f"{head['model']} on the first {num[0]} held-out math and {num[1]} code problems, decoded at {head['commit']}. "
        "Pass times: Dream-7B's shapes, one H100, from docs/results/methods_demo.json"
    )
    made = {"commit": commit(), "command": "python -m scripts.lab.pace " + " ".join(sys.argv[1:])}
    lost = f"Lost: points against {CAREFUL}, 95 % of paired resamples"
    tables = {
        "speeds": {
            "conditions": f"Tokens/s, replayed. {where}. Least: the lowest share of a pace's fastest way, at any load",
            "columns": [["setting", ""], *([f"{load} at once", ",.0f"] for load in LOADS),
                        ["rising and falling", ",.0f"], ["least", ".3f"]],
            "rows": speeds(kinds, read_pass_times(RESULTS / "methods_demo.json")),
            **made,
        },
        "accuracy": {
            "conditions": f"{where}. {lost}",
            "columns": [["setting", ""], ["math", ""], ["lost", ""], ["code", ""], ["lost", ""], ["TPF", ".2f"],
                        ["entries a pass", ".0f"]],
            "rows": [accuracy(way, kinds) for way in ways],
            **made,
        },
    }  # fmt: skip
    write(known.to, {"tables": tables})


if __name__ == "__main__":
    main()
