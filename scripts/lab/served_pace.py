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
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from common.batch import InputLine, read_lines
from common.config import load_profile, load_run
from common.scoring import score
from scripts.lab.result import ROOT, card, commit, write
from tests.engine.serving.served import Served

LEVELS = (1, 2, 4, 8, 16, 32, 64, 32, 16, 8, 4, 2, 1)
_RUN = "demo"
_SWEEP = ROOT / "configs" / "sweeps" / "pace.yaml"
_PROCESSES = 4  # of clients: one would be slower than the server
_WARM_S = 5.0


class Ended(NamedTuple):
    """An answer. stretch: number of the level at its end."""

    stretch: int
    problem: int
    num_tokens: int
    text: str


def rows() -> dict[str, list[str]]:
    """Return options of the server for each row of the sweep."""
    sweep = yaml.safe_load(_SWEEP.read_text(encoding="utf-8"))
    found = {}
    for row in sweep["rows"]:
        settings = {f"decode.{key}": value for key, value in {**sweep["decode"], **row.get("decode", {})}.items()}
        settings |= row.get("set", {})
        found[row["name"]] = [f"{key}={value}" for key, value in settings.items()]
    return found


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


def problems() -> tuple[list[InputLine], list[str]]:
    given = load_run(_RUN).input
    assert given is not None, "the run has one"
    lines = read_lines(given)
    assert given.prompt_template is not None, "the run has one"
    return lines, [given.prompt_template.format(**line.fields) for line in lines]


def measured(name: str, settings: list[str], profile: str, stretch_s: float) -> list[Any]:
    """Return a row: tokens/s of each level, of all, and the share of right answers."""
    lines, prompts = problems()
    given = [word for setting in (*settings, f"max_num_requests={max(LEVELS)}") for word in ("--set", setting)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Served(Path(folder) / "log", *given, model=_RUN, profile=profile) as server,
        ProcessPoolExecutor(_PROCESSES) as pool,
    ):
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
    return [name, *by_level, sum(tokens) / stretch_s / len(LEVELS), 100 * right, len(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("output", type=Path)
    parser.add_argument("--settings", nargs="+", choices=list(rows()), default=list(rows()))
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
    for name in known.settings:
        result["rows"].append(measured(name, rows()[name], known.profile, known.stretch))
        print(result["rows"][-1], flush=True)
        write(known.output, result)


if __name__ == "__main__":
    main()
