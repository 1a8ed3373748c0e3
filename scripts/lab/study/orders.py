"""How much the order of filling matters: many orders drawn at random for each problem, and where lookahead lies.

python -m scripts.lab.study.orders --profile cpu --run demo --problems 20 --orders 100 --out outputs/study/orders.json

An order is drawn by giving every step one lookahead at a random mask and letting it win unread (`branch_score:
lookahead`); masks above the threshold are filled as ever. So a random order fills as many tokens by guess as LoPA does.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np

from common.scoring import score
from scripts.lab.study import given

RANDOM = {"num_lookahead": 1, "spawn_rule": "random", "branch_score": "lookahead"}


def study(generator: given.Generator, num_problems: int, num_orders: int) -> dict[str, Any]:
    """TPF is effective. percentile: share of a problem's random orders that LoPA's TPF reaches or beats."""
    posed = given.problems(generator.run, num_problems)
    orders = given.decode(generator, RANDOM, given.requests(generator, posed, range(num_orders)))
    single = given.requests(generator, posed, [0])
    lopa, plain = given.decode(generator, {}, single), given.decode(generator, {"num_lookahead": 0}, single)
    rows = []
    for index, problem in enumerate(posed):
        own = [orders[f"{index}/{seed}"] for seed in range(num_orders)]
        tpf = np.array([completion.num_effective_tokens / completion.num_forwards for completion in own])
        right = [score(problem.fields, generator.tokenizer.decode(list(completion.token_ids))) for completion in own]
        reached, base = (
            found[f"{index}/0"].num_effective_tokens / found[f"{index}/0"].num_forwards for found in (lopa, plain)
        )
        rows.append(
            {
                "worst": float(tpf.min()), "mean": float(tpf.mean()), "best": float(tpf.max()), "lopa": reached,
                "no_lookahead": base, "percentile": float((tpf <= reached).mean()), "right": fmean(right),
                "lopa_right": score(problem.fields, generator.tokenizer.decode(list(lopa[f"{index}/0"].token_ids))),
            }
        )  # fmt: skip
    return {
        "problems": len(posed), "orders": num_orders, "num_lookahead": generator.run.decode.num_lookahead,
        "mean": {name: fmean(row[name] for row in rows) for name in rows[0]}, "rows": rows,
        "environment": generator.describe(),
    }  # fmt: skip


def main() -> None:
    parser = given.parser(__doc__)
    parser.add_argument("--orders", type=int, default=100)
    options = parser.parse_args()
    with given.load(options) as generator:
        given.write(options.out, study(generator, options.problems, options.orders))


if __name__ == "__main__":
    main()
