"""What a pass costs more when its answers are held to a format, beside passes of the same shape without.

python -m scripts.lab.structured_steps compile VOCABULARY.tiktoken AUTOMATA.pickle    # see scripts/lab/structured.py
python -m scripts.lab.structured_steps measure PROFILE AUTOMATA.pickle OUTPUT.json
python -m scripts.lab.structured_steps host AUTOMATA.pickle OUTPUT.json

`measure` times Dream-7B's shapes with random weights, a block of 32 at a time, with and without each format in turns.
Only passes are compared in which all requests are under way, by their number of tokens. `host` times the scheduler's
part alone, over random predictions, without what it does while a device computes.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from common.config import DecodeConfig, load_profile, load_run
from common.constraints import Automaton, Compiler, Format
from common.decoding import ClassStatistics, GenerationRequest, ModelFacts, Predictions, Scheduler, StepPlan
from common.generate import Generator, build_generator
from scripts.lab.result import busy_cpu, write_table
from scripts.lab.structured import FORMATS, read_vocabulary

AT_ONCE = (1, 16)
ROUNDS = {1: 8, 16: 2}  # a pass of one request is short, and its excess a few of its hundredths
SETTINGS = [
    "decode.num_lookahead=0", "decode.block_size=32", "decode.block_add_threshold=1", "decode.stop_at_eos=true",
    "decode.max_new_tokens=128", f"max_num_requests={max(AT_ONCE)}",
]  # fmt: skip
PROMPT = 512
PASSES = 150
MASK_TOKEN, END_TOKEN = 151_666, 151_643  # Dream's

Times = dict[tuple[int, int], list[float]]  # milliseconds by rows and tokens of a pass


def compile_all(vocabulary: str, output: str) -> None:
    """Write the automata of all formats, by name."""
    tokens, vocab_size = read_vocabulary(vocabulary)
    compiler = Compiler(lambda: tokens, vocab_size)
    found = {}
    for name, (kind, value) in FORMATS.items():
        found[name] = compiler.automaton(Format(kind, "" if value is None else json.dumps(value)))  # type: ignore[arg-type]
    Path(output).write_bytes(pickle.dumps(found))


def times(generator: Generator, at_once: int, automaton: Automaton | None, name: str) -> Times:
    """Decode so many requests at once, and return the times of passes by shape."""
    found: Times = defaultdict(list)
    plans: list[StepPlan] = []
    engine: Any = generator.engine
    launch = engine.launch

    def noting(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    engine.launch = noting
    try:
        with generator.decoding() as core:
            for number in range(at_once):
                prompt = tuple((number * 7 + n * 13) % 1000 for n in range(PROMPT))
                core.add_request(GenerationRequest(f"{name}/{number}", prompt, automaton=automaton))
            began = time.perf_counter()
            while core.has_work:
                core.step()
                ended = time.perf_counter()
                if len(plans) > 2 and plans[-1].num_rows == plans[-2].num_rows == at_once:
                    found[at_once, int(plans[-2].num_entries_R.sum())].append(1e3 * (ended - began))
                began = ended
    finally:
        del engine.launch
    return found


def compared(without: Times, held: Times) -> tuple[float, float, int] | None:
    """Return mean milliseconds without and with, over shapes that both have had five times, and the passes compared.

    None: there is no such shape, as for short answers that are never all under way.
    """
    shapes = [shape for shape in without if min(len(without[shape]), len(held[shape])) >= 5]
    if not shapes:
        return None
    return (
        fmean(median(without[shape]) for shape in shapes),
        fmean(median(held[shape]) for shape in shapes),
        sum(len(held[shape]) for shape in shapes),
    )


def measure(profile: str, automata: str, output: str) -> None:
    """Write the table of all formats at one and at many requests."""
    import torch

    formats: dict[str, Automaton] = pickle.loads(Path(automata).read_bytes())
    run = load_run("dream_7b_dummy", SETTINGS)
    rows = []
    with build_generator(load_profile(profile, ["max_model_len=1024"]), run) as generator:
        for at_once in AT_ONCE:
            times(generator, at_once, None, "warm")
            for name, automaton in formats.items():
                without: Times = defaultdict(list)
                held: Times = defaultdict(list)
                for number in range(ROUNDS[at_once]):
                    for into, one in ((without, None), (held, automaton)):
                        for shape, seen in times(generator, at_once, one, f"{name}/{number}").items():
                            into[shape] += seen
                if (found := compared(without, held)) is None:
                    continue
                free_ms, held_ms, count = found
                rows.append([at_once, name, free_ms, held_ms, 100 * (held_ms / free_ms - 1), count])
                print(rows[-1], flush=True)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    command = f"python -m scripts.lab.structured_steps measure {profile} AUTOMATA.pickle OUTPUT.json"
    conditions = (
        f"Dream-7B's shapes in bf16, random weights, k = 0, blocks of 32 one by one, prompt {PROMPT}. Whole steps in "
        "ms, the mean over shapes of medians, in turns; automata over Qwen's vocabulary"
    )
    columns = [
        ["at once", ",.0f"], ["format", ""], ["without, ms", ".2f"], ["held to it, ms", ".2f"], ["more, %", ".1f"],
        ["passes", ",.0f"],
    ]  # fmt: skip
    write_table(Path(output), where, command, conditions, columns, rows)


def host_ms(automaton: Automaton | None, at_once: int, temperature: float) -> float:
    """Return the median milliseconds of a step between two passes."""
    settings = {
        "num_lookahead": 0, "block_size": 32, "block_add_threshold": 1, "max_new_tokens": 128,
        "temperature": temperature,
    }  # fmt: skip
    scheduler = Scheduler(
        DecodeConfig.model_validate(settings), mask_token_id=MASK_TOKEN, eos_token_id=END_TOKEN, num_slots=at_once,
        facts=ModelFacts(shift=1),
    )  # fmt: skip
    for number in range(at_once):
        scheduler.admit(GenerationRequest(str(number), tuple(range(PROMPT)), automaton=automaton))
    rng, found = np.random.default_rng(0), []
    while scheduler.active and len(found) < PASSES:
        began = time.perf_counter()
        plan = scheduler.plan_step()
        planned = time.perf_counter() - began
        scheduler.look_ahead()  # while the device computes
        predictions = random_predictions(plan, rng)
        began = time.perf_counter()
        scheduler.advance(scheduler.select_winners(predictions))
        found.append(1e3 * (planned + time.perf_counter() - began))
    return median(found[3:])


def random_predictions(plan: StepPlan, rng: np.random.Generator) -> Predictions:
    """Return predictions of a pass with the statistics of the formats' classes."""
    token_T, probability_T = rng.integers(100, 1000, plan.num_tokens), rng.random(plan.num_tokens, np.float32)
    classes, request_T = {}, plan.request_R.repeat(plan.num_entries_R)
    automaton_of = plan.automaton_of or {}
    for own in {one.key: one for one in automaton_of.values()}.values():
        asking = [request for request, one in automaton_of.items() if one.key == own.key]
        entry_X = (np.isin(request_T, asking) & plan.is_read_T).nonzero()[0]
        token_C = np.zeros(own.num_classes, np.int64)
        token_C[own.class_V[::-1]] = np.arange(len(own.class_V))[::-1]  # the first of each
        logit_XC = 4 * rng.standard_normal((len(entry_X), own.num_classes))
        found = (np.broadcast_to(token_C, logit_XC.shape), logit_XC, logit_XC, logit_XC + 0.5, logit_XC)
        classes[own.key] = ClassStatistics(entry_X, np.stack(found, axis=-1).astype(np.float32))
    return Predictions.of(token_T, probability_T, probability_T)._replace(classes=classes or None)


def measure_host(automata: str, output: str) -> None:
    """Write the table of what the scheduler takes more for each format."""
    formats: dict[str, Automaton] = pickle.loads(Path(automata).read_bytes())
    rows = []
    for name, automaton in formats.items():
        cells = []
        for at_once in AT_ONCE:
            for temperature in (0.0, 0.8):
                free, held = (
                    min(host_ms(one, at_once, temperature) for _ in range(ROUNDS[at_once])) for one in (None, automaton)
                )
                cells.append(max(held - free, 0.0))
        rows.append([name, len(automaton.edges_3E[0]), *cells])
        print(rows[-1], flush=True)
    columns = [[f"{at_once} at once, {how}", ".2f"] for at_once in AT_ONCE for how in ("greedy", "drawn")]
    command = "python -m scripts.lab.structured_steps host AUTOMATA.pickle OUTPUT.json"
    conditions = (
        f"Milliseconds of the scheduler between two passes that a pass takes more, medians of {PASSES} passes over "
        "random predictions; k = 0, blocks of 32; automata over Qwen's vocabulary"
    )
    write_table(Path(output), busy_cpu(), command, conditions, [["format", ""], ["edges", ",.0f"], *columns], rows)


if __name__ == "__main__":
    {"compile": compile_all, "measure": measure, "host": measure_host}[sys.argv[1]](*sys.argv[2:])
