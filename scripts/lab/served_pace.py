"""Ask a server held-out problems under a load that rises and falls: by every way of the paces, and by the paces.

python -m scripts.lab.served_pace PROFILE OUTPUT.json [--settings k3 fast ...] [--stretch 3]

One server of models/demo after the other, with a row's settings of configs/sweeps/pace.yaml. So many clients as the
level says ask one problem after another, each level for a stretch of seconds; tokens count where their answer ends.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from common.batch import read_lines
from common.commands.arguments.options import save_run_file
from common.config import SweepPoint, find_config, load_profile, load_sweep
from common.scoring import score
from scripts.lab.result import card, commit, write
from tests.engine.serving.served import Served

LEVELS = (1, 2, 4, 8, 16, 32, 64, 32, 16, 8, 4, 2, 1)
_PROCESSES = 4  # of clients: one would be slower than the server
_WARM_S = 5.0


class Ended(NamedTuple):
    """An answer. stretch: number of the level at its end."""

    stretch: int
    problem: int
    num_tokens: int
    text: str


def ask(port: int, prompts: list[str], share: tuple[int, int], levels: list[int], stretch_s: float) -> list[Ended]:
    """Ask, as this share of all clients, until the last stretch is over.

    share: number of this process, and of all; clients are dealt to the processes in turn.
    """
    number, num_processes = share
    began = time.monotonic()
    ended: list[Ended] = []
    places = count(number * len(prompts) // num_processes)

    def stretch() -> int:
        return int((time.monotonic() - began) / stretch_s)

    def work(client: int) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=120)
        while (now := stretch()) < len(levels):
            if client >= levels[now]:
                time.sleep(0.005)
                continue
            place = next(places) % len(prompts)
            body = json.dumps({"prompt": prompts[place], "max_tokens": 192})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            text, num_tokens = answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
            ended.append(Ended(stretch(), place, num_tokens, text))
        connection.close()

    threads = [threading.Thread(target=work, args=(client,)) for client in range(number, max(levels), num_processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def measured(point: SweepPoint, profile: str, stretch_s: float) -> list[Any]:
    """Return a row: tokens/s of each level, of all, and the share of right answers."""
    source = point.run.input
    assert source is not None and source.prompt_template is not None, "the run has both"
    lines = read_lines(source)
    prompts = [source.prompt_template.format(**line.fields) for line in lines]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_run_file(folder / "run.yaml", point.run)
        served = Served(folder / "log", model=str(folder / "run.yaml"), profile=profile)
        server = stack.enter_context(served)
        pool = stack.enter_context(ProcessPoolExecutor(_PROCESSES))
        shares = [(number, _PROCESSES) for number in range(_PROCESSES)]

        def asked(levels: list[int], seconds: float) -> list[Ended]:
            told = [pool.submit(ask, server.port, prompts, share, levels, seconds) for share in shares]
            return [one for each in told for one in each.result()]

        asked([max(LEVELS)], _WARM_S)
        found = asked(list(LEVELS), stretch_s)
    tokens = [0.0] * len(LEVELS)
    for one in found:
        if one.stretch < len(LEVELS):
            tokens[one.stretch] += one.num_tokens
    by_level = [
        sum(each for each, level in zip(tokens, LEVELS, strict=True) if level == own) / stretch_s / LEVELS.count(own)
        for own in sorted(set(LEVELS))
    ]
    right = sum(bool(score(lines[one.problem].fields, one.text)) for one in found) / len(found)
    return [point.name, *by_level, sum(tokens) / stretch_s / len(LEVELS), 100 * right, len(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("output", type=Path)
    parser.add_argument("--settings", nargs="+", default=(), help="names of rows; all if not given")
    parser.add_argument("--stretch", type=float, default=3.0, help="seconds of a level")
    known = parser.parse_args()
    columns = [["setting", ""], *([f"{level} at once", ",.0f"] for level in sorted(set(LEVELS)))]
    columns += [["all, tokens/s", ",.0f"], ["right, %", ".1f"], ["answers", ",.0f"]]
    result: dict[str, Any] = {
        "card": card(load_profile(known.profile).device),
        "commit": commit(),
        "conditions": f"models/demo behind `lopa serve`, {_PROCESSES} processes of clients; {known.stretch:g} s at "
        f"each of {', '.join(map(str, LEVELS))} requests at once, one after another",
        "command": "python -m scripts.lab.served_pace " + " ".join(sys.argv[1:]),
        "columns": columns,
        "rows": [],
    }
    overrides = [f"max_num_requests={max(LEVELS)}"]
    for point in load_sweep(find_config("sweeps", "pace"), known.profile, "demo", overrides, known.settings).points:
        result["rows"].append(measured(point, known.profile, known.stretch))
        print(result["rows"][-1], flush=True)
        write(known.output, result)


if __name__ == "__main__":
    main()
