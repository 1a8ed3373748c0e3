"""Decode with the demo model, note the tokens of every pass, and replay these passes at several loads by measured pass
times.

python -m scripts.lab.study.replay decode --run demo --sweep methods --problems 500 --out outputs/methods/math
python -m scripts.lab.study.replay table MATH CODE --to docs/results/methods_demo.json

With `--sweep pace` it decodes the ways that paces choose from, for `scripts/lab/pace.py`.

Another model is told by `--set model=FOLDER --set input.path=FOLDER/heldout_math.jsonl`, and its table by `--like` the
file of the demo model, whose pass times it takes.

What a request computes does not depend on what shares its passes, so one decoding serves all loads. `decode` leaves a
file a setting, goes on where it was stopped, and adds problems to those that are there; `table` takes the problems that
all settings have.

The pass times are those of `wall_clock_h100.json`: a setting that stands there at a load with so many tokens a second,
and here with so many tokens a pass, took their quotient a pass of so many tokens. Between these it is a straight line.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.config import find_config, load_sweep, slug
from common.decoding import Completion, Pacer, PassCosts
from common.scoring import score
from scripts.lab import result
from scripts.lab.study import given
from scripts.lab.study.bootstrap import difference, in_points, paired_interval

LOADS = (1, 4, 16, 64)
BASE, OTHERS = "k = 0", ("LoPA, k = 3", "LoPA, k = 7")
_LEAST_ROUNDS = 8  # requests after one another in each place


class Answer(NamedTuple):
    """passes: tokens that each pass computed for the request, all rows together."""

    right: bool
    num_tokens: int
    passes: list[int]


def decode(options: argparse.Namespace) -> None:
    """Write a file of answers for each setting of the sweep, or what it lacks."""
    options.out.mkdir(parents=True, exist_ok=True)
    with given.load(options) as generator:
        model = f"{Path(generator.run.model).name} in {generator.profile.dtype}"
        head = {"card": result.card(generator.profile.device), "model": model, "commit": result.commit()}
        posed = given.problems(generator.run, options.problems)
        for point in load_sweep(find_config("sweeps", options.sweep), options.profile, options.run).points:
            path = options.out / f"{slug(point.name)}.json"
            there = json.loads(path.read_text(encoding="utf-8"))["answers"] if path.exists() else []
            if (
                len(there) >= len(posed)
                or (options.only and point.name not in options.only)
                or point.run.pace != "fixed"
            ):
                continue
            found = [Answer(*answer) for answer in there]
            found += _answers(generator, point.run.decode, posed[len(there) :])
            path.write_text(json.dumps({**head, "name": point.name, "answers": found}), encoding="utf-8")
            print(point.name, np.mean([answer.right for answer in found]), flush=True)


def _answers(generator: given.Generator, decode: Any, posed: Sequence[Any]) -> list[Answer]:
    passes: dict[str, list[int]] = defaultdict(list)
    done: dict[str, Completion] = {}
    with generator.with_decode(decode).decoding() as core:
        plan_step = core.scheduler.plan_step

        def noted() -> Any:
            plan = plan_step()
            tokens_N = np.bincount(plan.request_R, plan.num_entries_R)
            for decoding, count in zip(core.scheduler.active, tokens_N, strict=True):
                passes[decoding.request.id].append(int(count))
            return plan

        core.scheduler.plan_step = noted  # type: ignore[method-assign]
        for request in given.requests(generator, list(posed), [0]):
            core.add_request(request)
        while core.has_work:
            for output in core.step():
                if isinstance(output.result, Completion):
                    done[output.id] = output.result
    found = []
    for index, problem in enumerate(posed):
        completion = done[f"{index}/0"]
        text = generator.tokenizer.decode(list(completion.token_ids))
        found.append(Answer(bool(score(problem.fields, text)), completion.num_effective_tokens, passes[f"{index}/0"]))
    return found


class Replay:
    """Requests of these answers at any load, in passes that take these times.

    answers_W: of each way of decoding, to the same problems. pacer: chooses among the ways; a request that changes its
    way goes on with the same share of the other way's passes. Without one all requests go the first way. costs None:
    a pass takes a second.
    """

    def __init__(
        self, answers_W: Sequence[Sequence[Answer]], costs: PassCosts | None = None, pacer: Pacer | None = None
    ) -> None:
        self._answers_W, self._costs, self._pacer = answers_W, costs, pacer
        self._free: list[int] = []
        self._way_of: dict[int, int] = {}  # by slot
        self._active: dict[int, tuple[int, float]] = {}  # slot -> problem, share that is done
        self.num_begun = self.num_passes = 0
        self.seconds = self.filled = self.computed = 0.0

    def step(self, at_once: int) -> None:
        """Decode a pass of so many requests; places that have become free are taken first."""
        while len(self._active) < at_once:
            slot = self._free.pop() if self._free else len(self._way_of)
            self._way_of[slot] = 0
            self._active[slot] = (self.num_begun % len(self._answers_W[0]), 0.0)
            self.num_begun += 1
            if self._pacer is not None:
                self._pacer.admit(slot, is_paced=True)
        slot_N = np.array([*self._active])
        if self._pacer is not None:
            self._way_of.update(self._pacer.turn(slot_N))
        tokens_N = []
        for slot, (problem, share) in self._active.items():
            own = self._answers_W[self._way_of[slot]][problem]
            tokens_N.append(own.passes[min(int(share * len(own.passes) + 0.5), len(own.passes) - 1)])
            self._active[slot] = (problem, share + 1 / len(own.passes))
            self.filled += own.num_tokens / len(own.passes)
        took = 1.0 if self._costs is None else self._costs.at(sum(tokens_N))
        self.seconds, self.computed = self.seconds + took, self.computed + sum(tokens_N)
        self.num_passes += 1
        if self._pacer is not None:
            self._pacer.note(slot_N, np.array(tokens_N, dtype=np.float64))
            self._pacer.took(took)
        for slot, (problem, share) in [*self._active.items()]:
            if share > 1 - 1e-6:
                if self._pacer is not None:
                    self._pacer.end(slot, self._answers_W[self._way_of[slot]][problem].num_tokens)
                del self._active[slot]
                self._free.append(slot)


def replayed(answers: Sequence[Answer], at_once: int, costs: PassCosts | None) -> Replay:
    """Return the replay of so many requests at once, each followed by the next one; what comes after the last has begun
    is left out."""
    replay = Replay([answers], costs)
    while replay.num_begun < len(answers) * -(-_LEAST_ROUNDS * at_once // len(answers)):
        replay.step(at_once)
    return replay


def speed(answers: Sequence[Answer], at_once: int, costs: PassCosts) -> float:
    """Return tokens a second of so many requests at once."""
    replay = replayed(answers, at_once, costs)
    return replay.filled / replay.seconds


class Measured(NamedTuple):
    """What a setting that is replayed was measured at."""

    name: str
    at_once: int
    tokens_per_s: float


def measured_too(answers: Mapping[str, Sequence[Answer]], file: Mapping[str, Any]) -> list[Measured]:
    """Return what the file of a wall-clock study measured of these settings."""
    table = file["tables"]["methods"]
    columns = {heading: place for place, (heading, _) in enumerate(table["columns"])}
    found = [
        Measured(row[0], load, row[columns[f"tokens/s, {load} at once"]]) for row in table["rows"] for load in LOADS
    ]
    return [one for one in found if one.name in answers and one.tokens_per_s is not None]


def pass_times(answers: Mapping[str, Sequence[Answer]], measured: Sequence[Measured]) -> PassCosts:
    """Return what passes took in these settings, by their mean number of tokens."""
    points = []
    for one in measured:
        replay = replayed(answers[one.name], one.at_once, None)
        filled, computed = replay.filled / replay.num_passes, replay.computed / replay.num_passes
        points.append((computed, filled / one.tokens_per_s))
    points.sort()
    rising = np.maximum.accumulate([seconds for _, seconds in points])
    return PassCosts([tokens for tokens, _ in points], rising.tolist())


def read_pass_times(path: Path) -> PassCosts:
    """Return the pass times that a table's file holds."""
    return PassCosts(**json.loads(path.read_text(encoding="utf-8"))["pass_times"])


def largest_miss(answers: Mapping[str, Sequence[Answer]], measured: Sequence[Measured], times: PassCosts) -> float:
    """Return by what share at the most the replay of a setting misses what was measured of it."""
    return max(abs(speed(answers[one.name], one.at_once, times) / one.tokens_per_s - 1) for one in measured)


def table_of(found: Mapping[str, Sequence[Answer]], times: PassCosts) -> list[list[Any]]:
    """Return a row a setting: accuracy, against other settings', tokens a pass and a token computed, tokens/s."""
    rows = []
    for name, answers in found.items():
        first = [float(answer.right) for answer in answers]
        row: list[Any] = [name, 100 * sum(first) / len(first)]
        for other in (BASE, *OTHERS):
            if name == other or other not in found:
                row.append(None)
                continue
            second = [float(answer.right) for answer in found[other]]
            row.append(in_points(paired_interval(first, second, difference)))
        num_tokens = sum(answer.num_tokens for answer in answers)
        row.append(num_tokens / sum(len(answer.passes) for answer in answers))
        row.append(num_tokens / sum(sum(answer.passes) for answer in answers))
        rows.append(row + [speed(answers, at_once, times) for at_once in LOADS])
    return rows


def read(folder: Path, names: Sequence[str]) -> dict[str, list[Answer]]:
    """Return the answers of these settings, of those that are there."""
    found = {}
    for name in names:
        path = folder / f"{slug(name)}.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))["answers"]
            found[name] = [Answer(*answer) for answer in kept]
    fewest = min(len(answers) for answers in found.values())
    return {name: answers[:fewest] for name, answers in found.items()}


def read_head(folder: Path, name: str) -> dict[str, Any]:
    """Return what a file of answers says of the card and the model."""
    head: dict[str, Any] = json.loads((folder / f"{slug(name)}.json").read_text(encoding="utf-8"))
    del head["answers"]
    return head


def table(options: argparse.Namespace) -> None:
    """Write a table of each kind of problems, of the settings that have answers there."""
    names = load_sweep(find_config("sweeps", options.sweep), "cpu", "demo").names
    found = {"math": read(options.math, names), "code": read(options.code, names)}
    decoded = read_head(options.math, BASE)
    file = json.loads((result.ROOT / "docs/results/wall_clock_h100.json").read_text(encoding="utf-8"))
    card, miss = file["tables"]["methods"]["card"], ""
    if options.like:
        times = read_pass_times(options.like)
    else:
        measured = measured_too(found["math"], file)
        times = pass_times(found["math"], measured)
        share = largest_miss(found["math"], measured, times)
        miss = f"; of the settings measured there it misses the tokens/s by up to {100 * share:.0f} %"
    columns = [["setting", ""], ["right, %", ".1f"], ["against k = 0", ""], ["against LoPA, k = 3", ""],
               ["against LoPA, k = 7", ""], ["tokens a pass", ".2f"], ["a token computed", ".3f"],
               *[[f"tokens/s, {load} at once", ",.0f"] for load in LOADS]]  # fmt: skip
    made = {
        kind: {
            "card": f"{decoded['card']}; pass times of an {card}",
            "commit": result.commit(),
            "conditions": f"{decoded['model']}, decoded at {decoded['commit']}, on "
            f"{len(next(iter(answers.values())))} held-out {kind} problems; "
            f"configs/sweeps/{options.sweep}.yaml: blocks of 16, tau 0.98 and shift_row fresh, but LoPA's tau 0.95 and "
            "stale. Against: points, 95 % of paired resamples. Tokens filled a pass, and a token computed. Tokens/s: "
            "what these passes would have taken with Dream-7B's shapes, by how long passes of so many tokens took in "
            f"wall_clock_h100.json{miss}",
            "columns": columns,
            "rows": table_of(answers, times),
        }
        for kind, answers in found.items()
    }
    result.write(options.to, {"tables": made, "pass_times": {"tokens": times.tokens, "seconds": times.seconds}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    decoding = parts.add_parser("decode", parents=[given.parser("", add_help=False)])
    decoding.add_argument("--sweep", default="methods")
    decoding.add_argument("--only", nargs="*", help="names of settings; all unless given")
    decoding.set_defaults(start=decode)
    writing = parts.add_parser("table")
    writing.add_argument("math", type=Path)
    writing.add_argument("code", type=Path)
    writing.add_argument("--sweep", default="methods")
    writing.add_argument("--like", type=Path, help="a table's file whose pass times this one takes")
    writing.add_argument("--to", type=Path, required=True)
    writing.set_defaults(start=table)
    options = parser.parse_args()
    options.start(options)


if __name__ == "__main__":
    main()
