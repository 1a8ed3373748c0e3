"""Measure what holding the demo's answers to their own form does to accuracy and passes.

python -m scripts.lab.structured_demo [PROBLEMS]    writes docs/results/structured_demo.json

Held-out math problems, the first in the file, greedy, with the demo's run, on a CPU. Every solution that the problems
come with has the form _SOLUTION; the other form leaves no room for one.
"""

from __future__ import annotations

import re
import sys
from statistics import fmean
from typing import Any

from common.config import load_profile, load_run
from common.generate import build_generator
from common.requests import Wishes
from common.scoring import score
from scripts.lab.result import RESULTS, heldout_math, write

RESULT = RESULTS / "structured_demo.json"
_SOLUTION = r"(?:[A-Za-z0-9 .,:;=+*/()'\-]+\n){1,12}#### [0-9]{1,6}"
FORMS = {
    "nothing": None,
    "lines of the solutions' letters, then #### and a number": _SOLUTION,
    "#### and a number alone": "#### [0-9]{1,6}",
}
_COUNT = 100


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else _COUNT
    problems = heldout_math(count)
    assert all(re.fullmatch(_SOLUTION, problem["answer"]) for problem in problems), "a solution is not of this form"
    run = load_run("demo", ["max_num_requests=8"])
    rows = []
    with build_generator(load_profile("cpu"), run) as generator:
        for k in (0, 7):
            for name, form in FORMS.items():
                rows.append([name, k, *measured(generator, problems, form, k)])
                print(*rows[-1], flush=True)
    found = {
        "conditions": f"The first {count} held-out math problems, models/demo, greedy, a CPU of two cores, 8 at once. "
        "Ended: before the canvas was full. Tokens, passes: of an answer, the mean",
        "command": "python -m scripts.lab.structured_demo",
        "columns": [["held to", ""], ["k", "d"], ["correct", "d"], ["ended", "d"], ["tokens", ".1f"],
                    ["passes", ".1f"]],
        "rows": rows,
    }  # fmt: skip
    write(RESULT, found)


def measured(generator: Any, problems: list[dict[str, Any]], form: str | None, k: int) -> list[float]:
    """Return how many are correct, how many ended, and the mean tokens and passes."""
    asked: dict[str, Any] = {"num_lookahead": k} | ({"structured_outputs": {"regex": form}} if form else {})
    make = generator.requests
    requests = [
        make.request(problem["id"], make.prompts.of(problem["question"] + "\n"), Wishes.read(asked))
        for problem in problems
    ]
    done = {one.id: one for one in generator.generate(requests)}
    texts = {id: generator.tokenizer.decode(one.token_ids) for id, one in done.items()}
    if form:
        assert all(re.fullmatch(form, text) for text in texts.values()), "a text is not of its form"
    num_correct = sum(score(problem, texts[problem["id"]]) for problem in problems)
    num_ended = sum(one.finish_reason == "eos" for one in done.values())
    tokens = fmean(len(one.token_ids) for one in done.values())
    return [num_correct, num_ended, tokens, fmean(one.num_forwards for one in done.values())]


if __name__ == "__main__":
    main()
