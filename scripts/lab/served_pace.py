"""Ask a server held-out problems under a load that rises and falls: by its pace, and by that pace's ways in turns.

python -m scripts.lab.served_pace PROFILE OUTPUT.json [--paces balanced fast] [--stretch 1.3]

One server of models/demo a pace. So many clients as the level says ask one problem after another; at each level those
that leave the pace to the server come first, then those that ask for one of its ways, each for a stretch of seconds, so
that all of them meet the same process and the same minute. Ways that a request cannot ask for are left out. Tokens
count where their answer ends, but for the begin of a stretch, when answers of the one before end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

from common.batch import read_lines
from common.commands.arguments.options import save_run_file
from common.config import DecodeConfig, find_config, load_profile, load_sweep, ways_of
from common.requests import PaceFields
from common.scoring import score
from scripts.lab.result import card, commit, write
from tests.engine.serving.served import Served

LEVELS = (1, 2, 4, 8, 16, 32, 64, 32, 16, 8, 4, 2, 1)
_PROCESSES = 4  # of clients: one would be slower than the server
_WARM_S = 5.0
_UNCOUNTED = 0.3  # of a stretch
_OF_LOOKAHEADS = ("spawn_rule", "branch_score", "lookahead_rule")


class Setting(NamedTuple):
    """How a request asks to be decoded. diffusion: its field of this name."""

    name: str
    diffusion: Mapping[str, Any]


class Stretch(NamedTuple):
    level: int
    setting: Setting


class Ended(NamedTuple):
    """An answer. at: of its end, in stretches since the begin. asked: number of the stretch in which it was asked."""

    at: float
    asked: int
    problem: int
    num_tokens: int
    text: str


def settings_of(decode: DecodeConfig, pace: Any) -> list[Setting]:
    """Return the pace itself, and those of its ways that a request can ask for."""
    first, *_ = ways = ways_of(decode, pace)
    names = {*PaceFields.model_fields}
    same = [
        way
        for way in ways
        if not way.decode.num_lookahead
        or all(getattr(way.decode, name) == getattr(first.decode, name) for name in _OF_LOOKAHEADS)
    ]
    return [Setting(pace, {}), *(Setting(way.name, way.decode.model_dump(include=names)) for way in same)]


def ask(
    port: int, prompts: list[str], share: tuple[int, int], stretches: Sequence[Stretch], stretch_s: float
) -> list[Ended]:
    """Ask, as this share of all clients, until the last stretch is over.

    share: number of this process, and of all; clients are dealt to the processes in turn.
    """
    number, num_processes = share
    began = time.monotonic()
    ended: list[Ended] = []
    places = count(number * len(prompts) // num_processes)

    def at() -> float:
        return (time.monotonic() - began) / stretch_s

    def work(client: int) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=120)
        while (now := int(at())) < len(stretches):
            if client >= stretches[now].level:
                time.sleep(0.005)
                continue
            place = next(places) % len(prompts)
            asked = {"prompt": prompts[place], "max_tokens": 192, "diffusion": stretches[now].setting.diffusion}
            connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            text, num_tokens = answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
            ended.append(Ended(at(), now, place, num_tokens, text))
        connection.close()

    clients = range(number, max(one.level for one in stretches), num_processes)
    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def measured(pace: str, profile: str, stretch_s: float) -> list[list[Any]]:
    """Return a row a setting of a server of this pace: tokens/s of each level, of all, and the share of right
    answers."""
    overrides = [f"max_num_requests={max(LEVELS)}"]
    (point,) = load_sweep(find_config("sweeps", "pace"), profile, "demo", overrides, [pace]).points
    source = point.run.input
    assert source is not None and source.prompt_template is not None, "the run has both"
    lines = read_lines(source)
    prompts = [source.prompt_template.format(**line.fields) for line in lines]
    settings = settings_of(point.run.decode, pace)
    stretches = [Stretch(level, setting) for level, setting in product(LEVELS, settings)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_run_file(folder / "run.yaml", point.run)
        served = Served(folder / "log", model=str(folder / "run.yaml"), profile=profile)
        server = stack.enter_context(served)
        pool = stack.enter_context(ProcessPoolExecutor(_PROCESSES))
        shares = [(number, _PROCESSES) for number in range(_PROCESSES)]

        def asked(those: list[Stretch], seconds: float) -> list[Ended]:
            told = [pool.submit(ask, server.port, prompts, share, those, seconds) for share in shares]
            return [one for each in told for one in each.result()]

        asked([Stretch(max(LEVELS), settings[0])], _WARM_S)
        found = asked(stretches, stretch_s)
    tokens: dict[tuple[str, int], float] = defaultdict(float)
    right: dict[str, list[bool]] = defaultdict(list)
    for one in found:
        level, setting = stretches[one.asked]
        right[setting.name].append(bool(score(lines[one.problem].fields, one.text)))
        if int(one.at) == one.asked and one.at % 1 >= _UNCOUNTED:
            tokens[setting.name, level] += one.num_tokens
    counted_s = (1 - _UNCOUNTED) * stretch_s
    rows: list[list[Any]] = []
    for name, _ in settings:
        by_level = [tokens[name, level] / counted_s / LEVELS.count(level) for level in sorted(set(LEVELS))]
        of_all = sum(tokens[name, level] for level in set(LEVELS)) / counted_s / len(LEVELS)
        marks = right[name]
        rows.append([pace, name, *by_level, of_all, 100 * sum(marks) / len(marks), len(marks)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("output", type=Path)
    parser.add_argument("--paces", nargs="+", default=("balanced", "fast"))
    parser.add_argument("--stretch", type=float, default=1.3, help="seconds of a setting at a level")
    known = parser.parse_args()
    columns = [["pace of the server", ""], ["asked for", ""]]
    columns += [[f"{level} at once", ",.0f"] for level in sorted(set(LEVELS))]
    columns += [["all, tokens/s", ",.0f"], ["right, %", ".1f"], ["answers", ",.0f"]]
    result: dict[str, Any] = {
        "card": card(load_profile(known.profile).device),
        "commit": commit(),
        "conditions": f"models/demo behind `lopa serve`, {_PROCESSES} processes of clients; "
        f"{', '.join(map(str, LEVELS))} requests at once, one after another, {known.stretch:g} s of each setting in "
        f"turn at each, the first {_UNCOUNTED:.0%} not counted",
        "command": "python -m scripts.lab.served_pace " + " ".join(sys.argv[1:]),
        "columns": columns,
        "rows": [],
    }
    for pace in known.paces:
        result["rows"] += measured(pace, known.profile, known.stretch)
        write(known.output, result)
        print(json.dumps(result["rows"]), flush=True)


if __name__ == "__main__":
    main()
