"""What a pass costs more when its answers are held to a format, beside passes of the same shape without.

python -m scripts.lab.structured_steps compile VOCABULARY.tiktoken AUTOMATA.pickle    # see scripts/lab/structured.py
python -m scripts.lab.structured_steps measure PROFILE AUTOMATA.pickle OUTPUT.json

The second times Dream-7B's shapes with random weights, a block of 32 at a time, with and without each format in turns.
Only passes are compared in which all requests are under way, by their number of tokens.
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

from common.config import load_profile, load_run
from common.constraints import Automaton, Compiler, Format
from common.decoding import GenerationRequest, StepPlan
from common.generate import Generator, build_generator
from scripts.lab.result import commit, write
from scripts.lab.structured import FORMATS, read_vocabulary

AT_ONCE = (1, 16)
ROUNDS = 2
SETTINGS = [
    "decode.num_lookahead=0", "decode.block_size=32", "decode.block_add_threshold=1", "decode.stop_at_eos=true",
    "decode.max_new_tokens=128", f"max_num_requests={max(AT_ONCE)}",
]  # fmt: skip
PROMPT = 512

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


def compared(without: Times, held: Times) -> tuple[float, float, int]:
    """Return mean milliseconds without and with, over shapes that both have had five times, and the passes compared."""
    shapes = [shape for shape in without if min(len(without[shape]), len(held[shape])) >= 5]
    if not shapes:
        return float("nan"), float("nan"), 0
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
                for number in range(ROUNDS):
                    for into, one in ((without, None), (held, automaton)):
                        for shape, seen in times(generator, at_once, one, f"{name}/{number}").items():
                            into[shape] += seen
                free_ms, held_ms, count = compared(without, held)
                rows.append([at_once, name, free_ms, held_ms, 100 * (held_ms / free_ms - 1), count])
                print(rows[-1], flush=True)
    result = {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "commit": commit(),
        "conditions": f"Dream-7B's shapes in bf16, random weights, k = 0, blocks of 32 one by one, prompt {PROMPT}. "
        "Whole steps in ms, the mean over shapes of medians, in turns; automata over Qwen's vocabulary",
        "command": f"python -m scripts.lab.structured_steps measure {profile} AUTOMATA.pickle OUTPUT.json",
        "columns": [
            ["at once", ",.0f"], ["format", ""], ["without, ms", ".2f"], ["held to it, ms", ".2f"], ["more, %", ".1f"],
            ["passes", ",.0f"],
        ],
        "rows": rows,
    }  # fmt: skip
    write(Path(output), result)


if __name__ == "__main__":
    {"compile": compile_all, "measure": measure}[sys.argv[1]](*sys.argv[2:])
