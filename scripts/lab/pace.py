"""Show what the paces bring: every way and every pace at loads of 1 to 256 requests, replayed by measured pass times.

python -m scripts.lab.pace decode OUT --problems 200     the demo model's answers, a file a way, on a CPU
python -m scripts.lab.pace table OUT                     writes docs/results/pace.json

Another model is told by `--model FOLDER`, which has its held-out problems too, and its file by `--to`.

What a request computes does not depend on what shares its passes, so one decoding of a way serves all loads. A replay
runs the `Pacer` of the engine itself over these answers. A request that changes its way goes on with the same share of
the other way's passes.

Pass times are those of docs/results/wall_clock_h100.json: a setting with so many tokens a pass that came to so many
tokens a second took their quotient a pass. On a GPU, with real passes and real decoding:

lopa bench load dream_7b_dummy --answers demo --sweep pace --profile h200_tp1_bp1 --at-once 1 2 4 8 16 32 64
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from common.config import DecodeConfig, Pace, load_profile, load_run, paced, ways_of
from common.decoding import Completion, GenerationRequest, Pacer, PassCosts, Scheduler, decode_requests
from common.scoring import score
from scripts.lab.result import ROOT, busy_cpu, commit, write
from scripts.lab.study.bootstrap import difference, paired_interval

RESULT = ROOT / "docs" / "results" / "pace.json"
MEASURED = ROOT / "docs" / "results" / "wall_clock_h100.json"
PACES: tuple[Pace, ...] = get_args(Pace)[1:]
LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RUNS = {"demo": "heldout_math.jsonl", "demo_code": "heldout_code.jsonl"}
CAREFUL = "k0_in_turn"  # what accuracy is held against: no lookahead, one block after another
RISING = (1, 2, 4, 8, 16, 32, 16, 8, 4, 2, 1)  # requests at once, a stretch of problems each
_AT_ONCE = 16
_LEAST_REQUESTS = 400
_STRETCH_S = 4.0


class Answer(NamedTuple):
    """passes: entries that each pass computed for the request, the prompt's included."""

    right: bool
    num_tokens: int
    passes: list[int]


def pass_costs() -> PassCosts:
    """Return what passes of Dream-7B's shapes took, the scheduler's part included."""
    table = json.loads(MEASURED.read_text(encoding="utf-8"))["tables"]["methods"]
    places = {heading: place for place, (heading, _) in enumerate(table["columns"])}
    points = sorted(
        (at_once * row[places["TPF"] - 2] / row[places["use"]], at_once * row[places["TPF"] - 2] / speed)
        for row in table["rows"]
        for at_once in (1, 4, 16, 64)
        if (speed := row[places[f"tokens/s, {at_once} at once"]]) is not None
    )
    tokens, seconds = np.array(points).T
    part_P = np.array_split(np.arange(len(points)), len(points) // 4)
    tokens, seconds = np.array([[np.median(each[own]) for own in part_P] for each in (tokens, seconds)])
    return PassCosts(tokens.tolist(), np.maximum.accumulate(seconds).tolist())


def replayed(
    answers_W: Sequence[Sequence[Answer]], way: int | Pacer, costs: PassCosts, load_at: Callable[[float], int],
    until: Callable[[int, float], bool],
) -> tuple[float, dict[int, int]]:  # fmt: skip
    """Return tokens a second, and the requests' steps by way.

    answers_W: of each way, to the same problems. way: one for all, or what chooses. load_at: requests at once at this
    second; places that become free are taken at once. until: whether so many requests and seconds are enough.
    """
    most = max(LOADS)
    free, active = list(range(most)), dict[int, list[float]]()  # slot -> problem, share that is done
    way_of, steps = dict.fromkeys(range(most), way if isinstance(way, int) else 0), dict[int, int]()
    seconds, num_tokens, num_begun = 0.0, 0.0, 0
    while not until(num_begun, seconds):
        while len(active) < load_at(seconds):
            slot = free.pop()
            active[slot] = [num_begun % len(answers_W[0]), 0.0]
            num_begun += 1
            if isinstance(way, Pacer):
                way.admit(slot, is_paced=True)
        slot_N = np.array([*active])
        if isinstance(way, Pacer):
            way_of.update(way.turn(slot_N))
        entries = []
        for slot, state in active.items():
            own = answers_W[way_of[slot]][int(state[0])]
            entries.append(own.passes[min(int(state[1] * len(own.passes) + 0.5), len(own.passes) - 1)])
            state[1] += 1 / len(own.passes)
            num_tokens += own.num_tokens / len(own.passes)
            steps[way_of[slot]] = steps.get(way_of[slot], 0) + 1
        took = costs.at(sum(entries)) + costs.host_s(len(active))
        seconds += took
        if isinstance(way, Pacer):
            way.note(slot_N, np.array(entries, dtype=np.float64))
            way.took(took)
        for slot in [slot for slot, state in active.items() if state[1] > 1 - 1e-6]:
            if isinstance(way, Pacer):
                way.end(slot, answers_W[way_of[slot]][int(active[slot][0])].num_tokens)
            del active[slot]
            free.append(slot)
    return num_tokens / seconds, steps


def at_load(answers_W: Sequence[Sequence[Answer]], way: int | Pacer, costs: PassCosts, at_once: int) -> float:
    """Return tokens a second of so many requests at once."""
    enough = max(_LEAST_REQUESTS, 8 * at_once)
    return replayed(answers_W, way, costs, lambda _: at_once, lambda begun, _: begun >= enough)[0]


def rising(answers_W: Sequence[Sequence[Answer]], way: int | Pacer, costs: PassCosts) -> float:
    """Return tokens a second under a load that rises from one request and falls again."""
    levels = (*LOADS, *LOADS[-2::-1])

    def load_at(seconds: float) -> int:
        return levels[min(int(seconds / _STRETCH_S), len(levels) - 1)]

    return replayed(answers_W, way, costs, load_at, lambda _, seconds: seconds >= _STRETCH_S * len(levels))[0]


def decode(folder: Path, model_folder: str, num_problems: int, only: Sequence[str]) -> None:
    """Write a file of answers for each way and each pace."""
    from common.batch import prompt_or_reason, read_lines
    from common.generate import build_generator
    from common.runtime import facts_of

    folder.mkdir(parents=True, exist_ok=True)
    runs = [
        load_run(
            name, [f"max_num_requests={max(RISING)}", f"model={model_folder}", f"input.path={model_folder}/{file}"]
        )
        for name, file in RUNS.items()
    ]
    with build_generator(load_profile("cpu"), runs[0]) as generator:
        model = generator.model_config
        for name, settings, pace in settings_of(runs[0].decode):
            if only and name not in only:
                continue
            found: dict[str, list[Answer]] = {}
            for run in runs:
                assert run.input is not None, "both runs have one"
                lines = read_lines(run.input)[:num_problems]
                prompts = [prompt_or_reason(line, run.input, generator.tokenizer) for line in lines]
                clock = _Clock(pass_costs())
                scheduler = Scheduler(
                    settings, mask_token_id=model.mask_of(None), eos_token_id=model.eos_token_id, clock=clock,
                    num_slots=max(RISING), facts=facts_of(model), pace=pace, costs=clock.costs,
                )  # fmt: skip
                requests = [GenerationRequest(str(index), prompt) for index, prompt in enumerate(prompts)]
                levels = RISING if pace != "fixed" else (_AT_ONCE,)
                done, passes = decoded(requests, scheduler, generator.engine, levels, clock)
                texts = [generator.tokenizer.decode(list(each.token_ids), skip_special_tokens=True) for each in done]
                found[run.model + str(run.input.path)] = [
                    Answer(bool(score(line.fields, text)), each.num_effective_tokens, passes[each.id])
                    for line, text, each in zip(lines, texts, done, strict=True)
                ]
                print(name, scheduler.steps_by_way(), *(np.mean([a.right for a in own]) for own in found.values()))
            (folder / f"{name}.json").write_text(json.dumps([*found.values()]), encoding="utf-8")


def settings_of(decode: DecodeConfig) -> list[tuple[str, DecodeConfig, Pace]]:
    """Return every way, then every pace: its name, settings and pace."""
    fixed: list[tuple[str, DecodeConfig, Pace]] = [(name, own, "fixed") for name, own in _ways(decode).items()]
    return [*fixed, *((pace, paced(decode, pace), pace) for pace in PACES)]


def _ways(decode: DecodeConfig) -> dict[str, DecodeConfig]:
    return {way.name: way.decode for pace in PACES for way in ways_of(decode, pace)}


class _Clock:
    """The seconds that passes would have taken by these costs."""

    def __init__(self, costs: PassCosts) -> None:
        self.costs, self.now = costs, 0.0

    def __call__(self) -> float:
        return self.now


def decoded(
    requests: Sequence[GenerationRequest], scheduler: Scheduler, engine: Any, levels: Sequence[int], clock: _Clock
) -> tuple[list[Completion], dict[str, list[int]]]:
    """Return the completions in the requests' order, and the entries of each request's passes. levels: of the load, for
    equal parts of the requests one after another."""
    passes: dict[str, list[int]] = {request.id: [] for request in requests}
    plan_step = scheduler.plan_step

    def noted() -> Any:
        plan = plan_step()
        entries_N = np.bincount(plan.request_R, weights=plan.num_entries_R)
        clock.now += clock.costs.at(entries_N.sum()) + clock.costs.host_s(len(entries_N))
        for decoding, count in zip(scheduler.active, entries_N.tolist(), strict=True):
            passes[decoding.request.id].append(int(count))
        return plan

    def coming() -> Iterator[GenerationRequest | None]:
        for index, request in enumerate(requests):
            while len(scheduler.active) >= levels[index * len(levels) // len(requests)]:
                yield None
            yield request

    scheduler.plan_step = noted  # type: ignore[method-assign]
    done = {one.id: one for one in decode_requests(coming(), scheduler, engine) if isinstance(one, Completion)}
    return [done[request.id] for request in requests], passes


def _read(folder: Path, name: str) -> list[list[Answer]]:
    return [[Answer(*each) for each in own] for own in json.loads((folder / f"{name}.json").read_text("utf-8"))]


def table(folder: Path, model: str, to: Path) -> None:
    """Write the result file."""
    costs = pass_costs()
    found = {name: _read(folder, name) for name in _ways(load_run("demo").decode)}
    head = {"commit": commit(), "command": "python -m scripts.lab.pace " + " ".join(sys.argv[1:])}
    num = [min(map(len, kind)) for kind in zip(*found.values(), strict=True)]
    where = (
        f"{model}, float32, on a CPU; the first {num[0]} held-out math and {num[1]} code problems. "
        f"Pass times: Dream-7B's shapes, one H100, from docs/results/wall_clock_h100.json"
    )
    speeds = {
        "conditions": f"Tokens/s, replayed. {where}. Least: the lowest share of the fastest way of a pace, at any load",
        "columns": [["setting", ""], *([f"{load} at once", ",.0f"] for load in LOADS), ["rising and falling", ",.0f"],
                    ["least", ".3f"]],
        "rows": _speeds({name: [a[:n] for a, n in zip(own, num, strict=True)] for name, own in found.items()}, costs),
        **head,
    }  # fmt: skip
    accuracy = {
        "conditions": f"{where}. Lost: points "
        f"against {CAREFUL}, math and code problems each, 95 % of paired resamples",
        "columns": [["setting", ""], ["math", ""], ["lost", ""], ["code", ""], ["lost", ""], ["TPF", ".2f"],
                    ["entries a pass", ".0f"]],
        "rows": [_accuracy(name, folder) for name in (*found, *PACES) if (folder / f"{name}.json").exists()],
        **head,
    }  # fmt: skip
    write(to, {"cpu": busy_cpu(), "tables": {"speeds": speeds, "accuracy": accuracy}})


def _speeds(found: dict[str, list[list[Answer]]], costs: PassCosts) -> list[list[Any]]:
    mixed = {name: [answer for pair in zip(*own, strict=True) for answer in pair] for name, own in found.items()}
    rows: list[list[Any]] = []
    fixed: dict[str, list[float]] = {}
    for name, answers in mixed.items():
        fixed[name] = [at_load([answers], 0, costs, load) for load in LOADS] + [rising([answers], 0, costs)]
        rows.append([name, *fixed[name], None])
    decode = load_run("demo").decode
    for pace in PACES:
        own = ways_of(decode, pace)
        answers_W = [mixed[way.name] for way in own]
        speeds = [at_load(answers_W, Pacer(own, costs), costs, load) for load in LOADS]
        speeds.append(rising(answers_W, Pacer(own, costs), costs))
        best = np.max([fixed[way.name] for way in own], axis=0)
        rows.append([pace, *speeds, float((np.array(speeds) / best).min())])
    return rows


def _accuracy(name: str, folder: Path) -> list[Any]:
    own, base = _read(folder, name), _read(folder, CAREFUL)
    cells: list[Any] = [name]
    for answers, careful in zip(own, base, strict=True):
        right = [float(answer.right) for answer in answers]
        share = float(np.mean(right))
        cells.append(f"{100 * share:.1f} ± {100 * (share * (1 - share) / len(right)) ** 0.5:.1f} %")
        value, low, high = paired_interval(right, [float(answer.right) for answer in careful[: len(right)]], difference)
        cells.append(f"{100 * value:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})")
    both = [answer for answers in own for answer in answers]
    num_passes = sum(len(answer.passes) for answer in both)
    later = [count for answer in both for count in answer.passes[1:]]
    return [*cells, sum(answer.num_tokens for answer in both) / num_passes, float(np.mean(later))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("decode", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--problems", type=int, default=200, help="of each kind")
    parser.add_argument("--model", default="models/demo", help="a folder, with its held-out problems")
    parser.add_argument("--to", type=Path, default=RESULT, help="the result file")
    parser.add_argument("--only", nargs="+", default=(), help="ways and paces to decode")
    known = parser.parse_args()
    if known.what == "decode":
        decode(known.folder, known.model, known.problems, known.only)
    else:
        table(known.folder, known.model, known.to)


if __name__ == "__main__":
    main()
