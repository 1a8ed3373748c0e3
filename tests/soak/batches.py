"""Batch runs that are disturbed and started again until they are through: each line is answered once, with the text
that an undisturbed run gives it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.engine.serving.served import QUESTION, ROOT
from tests.soak.machine import Clock, SmallDisk, device_settings
from tests.soak.server import OF_TORCH, children_of, shared_memory, wait_until, with_variable

MARK = "LOPA_SOAK_CYCLE"
_END_S = 400.0
_MOST_STARTS = 6
_KNOWN = ("in.", "out.", "undisturbed.", "tmp")


class Cycle(NamedTuple):
    """A run that goes on, in `folder` on the small disk."""

    process: subprocess.Popen[str]
    output: Path
    disk: SmallDisk
    clock: Clock
    rng: random.Random

    def ranks(self) -> list[int]:
        """All its processes that decode; the launcher is none where there are several."""
        return children_of(self.process.pid) or [self.process.pid]


def nothing(cycle: Cycle) -> None:
    """A run that is left alone."""


def killed(cycle: Cycle) -> None:
    cycle.process.kill()


def rank_killed(cycle: Cycle) -> None:
    os.kill(cycle.rng.choice(cycle.ranks()), signal.SIGKILL)


def terminated(cycle: Cycle) -> None:
    cycle.process.terminate()


def rank_stopped(cycle: Cycle) -> None:
    victim = cycle.rng.choice(cycle.ranks())
    os.kill(victim, signal.SIGSTOP)
    time.sleep(cycle.rng.uniform(2, 6))
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGCONT)


def disk_full(cycle: Cycle) -> None:
    with cycle.disk.full(), suppress(subprocess.TimeoutExpired):
        cycle.process.wait(60)


def disk_frozen(cycle: Cycle) -> None:
    with cycle.disk.frozen(cycle.rng.uniform(3, 6)):
        pass


def clock_jumps(cycle: Cycle) -> None:
    for seconds in (86_400, -3600, 0):
        cycle.clock.jump(seconds)
        time.sleep(1.5)


class Fault(NamedTuple):
    name: str
    act: Callable[[Cycle], None]
    why_not: str | None = None


class Batches:
    """profile: of the runs; num_replicas: two or more are tried as ranks of one run, too."""

    def __init__(
        self, disk: SmallDisk, clock: Clock, profile: str, num_replicas: int, num_lines: int, rng: random.Random
    ):
        self.disk, self.clock, self.profile, self.num_replicas, self.rng = disk, clock, profile, num_replicas, rng
        self.num_lines = num_lines
        self.counts: dict[str, Counter[str]] = {}
        self.broken: list[str] = []
        self._number = 0
        self._expected: dict[tuple[bool, int], dict[str, str]] = {}
        self._running: subprocess.Popen[str] | None = None
        self._is_over = False
        several = None if num_replicas > 1 else "there is one device"
        self.faults: Sequence[tuple[Fault, int]] = [
            (fault, ranks)
            for ranks in (1, *([num_replicas] if num_replicas > 1 else []))
            for fault in (
                Fault("none", nothing),
                Fault("kill -9 of the process", killed),
                Fault("SIGTERM", terminated),
                Fault("disk full", disk_full, disk.why_not),
                Fault("kill -9 of a rank", rank_killed, several),
                Fault("a rank stopped for 2 to 6 s", rank_stopped),
                Fault("disk frozen for 3 to 6 s", disk_frozen, disk.why_not),
                Fault("clock jumps", clock_jumps),
            )
            if not (ranks == 1 and fault.name == "kill -9 of a rank")
        ]

    def run(self, is_over: Callable[[], bool], share: float) -> None:
        """One cycle after another, with pauses so that the mean is that share of a core."""
        turn = 0
        while not is_over():
            fault, ranks = self.faults[turn % len(self.faults)]
            turn += 1
            if fault.why_not is not None:
                continue
            began, used = time.monotonic(), _cpu_of_children()
            is_openai = bool(turn % 2)
            try:
                self.cycle(fault, ranks, is_openai)
            except Exception as error:
                self.broken.append(f"batch, {fault.name}: {error!r}")
            pause_s = (_cpu_of_children() - used) / share - (time.monotonic() - began)
            wait_until(is_over, max(1.0, min(600.0, pause_s)))

    def stop(self) -> None:
        self._is_over = True
        if self._running is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)

    def cycle(self, fault: Fault, ranks: int, is_openai: bool) -> None:
        """One run: disturbed once, started again until it is through, looked at."""
        self._number += 1
        name = fault.name
        shape = is_openai, self._number % 3
        counts = self.counts.setdefault(name, Counter())
        before = shared_memory()
        with tempfile.TemporaryDirectory(prefix="batch", dir=self.disk.path) as folder:
            home = Path(folder)
            (home / "in.jsonl").write_text("".join(line + "\n" for line in lines(self.num_lines, *shape)))
            (home / "tmp").mkdir()
            if shape not in self._expected:
                self._finish(home, "undisturbed", 1)
                self._expected[shape], _ = ends_of(home / "undisturbed.jsonl")
            counts["cycles"] += 1
            process = self._start(home, "out", ranks)
            output = home / "out.jsonl"
            at = self.rng.randint(1, self.num_lines // 2)
            wait_until(lambda: process.poll() is not None or num_lines_of(output) >= at, _END_S)
            counts["too late" if process.poll() is not None else "disturbed"] += name != "none"
            fault.act(Cycle(process, output, self.disk, self.clock, self.rng))
            code, said = _end(process)
            if code and not said.strip().splitlines()[-1:]:
                counts["silent ends"] += fault.act not in (killed,)
            if "Traceback" in said:
                self.broken.append(f"batch, {name}: a traceback: {said[said.index('Traceback') :][:4000]}")
            if code:
                counts["restarts"] += self._finish(home, "out", ranks)
            self._compare(name, ends_of(output), self._expected[shape], counts)
            self._look_for_leaks(name, home, before)

    def _compare(
        self, name: str, found: tuple[dict[str, str], int], expected: Mapping[str, str], counts: Counter[str]
    ) -> None:
        ends, num_doubled = found
        wrong = [key for key in expected if key in ends and ends[key] != expected[key]]
        lost = expected.keys() - ends.keys()
        counts["in"] += len(expected)
        counts["out"] += len(ends)
        for what, number, which in (
            ("lost", len(lost), sorted(lost)), ("doubled", num_doubled, []), ("wrong", len(wrong), wrong),
            ("doubled", len(ends.keys() - expected.keys()), sorted(ends.keys() - expected.keys())),
        ):  # fmt: skip
            counts[what] += number
            if number:
                one = which[0] if which else ""
                self.broken.append(f"batch, {name}: {number} {what}: {which} {ends.get(one)!r} {expected.get(one)!r}")

    def _look_for_leaks(self, name: str, home: Path, before: set[str]) -> None:
        cycle = f"{self._number}"
        wait_until(lambda: not with_variable(MARK, cycle), 20)
        left = {
            "processes": with_variable(MARK, cycle),
            "shared memory": sorted(shared_memory() - before),
            "temporary files": sorted(path.name for path in (home / "tmp").iterdir() if not _is_left(path.name, name)),
            "files": sorted(path.name for path in home.iterdir() if not path.name.startswith(_KNOWN)),
        }
        self.broken += [f"batch, {name}: left behind: {what} {which}" for what, which in left.items() if which]

    def _finish(self, home: Path, output: str, ranks: int) -> int:
        """Start it until it is through; how often that was."""
        for number in range(1, _MOST_STARTS + 1):
            code, said = _end(self._start(home, output, ranks))
            if code == 0 or self._is_over:
                return number
        raise RuntimeError(f"{_MOST_STARTS} starts did not finish it: {said[-500:]}")

    def _start(self, home: Path, output: str, ranks: int) -> subprocess.Popen[str]:
        settings = {"decode.num_lookahead": 1, "decode.max_new_tokens": 32, "max_num_requests": 4}
        options = ["in.jsonl", "-o", f"{output}.jsonl"]
        options += device_settings(self.profile)
        options += [item for key, value in settings.items() for item in ("--set", f"{key}={value}")]
        if ranks == 1:
            command = [sys.executable, "-m", "common.commands", "run", "demo", "--profile", self.profile, *options]
        else:
            options += ["--set", f"mesh.data_parallel_size={ranks}"]
            command = [str(ROOT / "scripts" / "run_batch.sh"), self.profile, "demo", *options]
        environment = {**os.environ, **self.clock.environment, "PYTHON": sys.executable}
        environment |= {MARK: f"{self._number}", "TMPDIR": str(home / "tmp")}
        self._running = subprocess.Popen(
            command, cwd=home, env=environment, text=True, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        return self._running


def _is_left(file: str, fault: str) -> bool:
    """Whether a file in the temporary folder is to be expected: a launcher that is killed with -9 cannot tidy up."""
    return file == OF_TORCH or (file.startswith("lopa-launcher-") and fault == "kill -9 of the process")


def lines(number: int, is_openai: bool, seed: int) -> list[str]:
    """Requests of a batch file, some of which are wrong."""
    made: list[Any] = []
    for place in range(number):
        name, text = f"{seed}-{place}", QUESTION.format(10 + (7 * place + seed) % 80) + "\n"
        wrong = place % 8 == 5
        if is_openai:
            body = {"prompt": text, "max_tokens": 24, "temperature": 0.8 * (place % 2), "seed": place}
            body |= {"top_p": 7} if wrong else {}
            made.append({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})
        else:
            made.append({"id": name, "prompt": "long " * 6000 if wrong else text})
    return [json.dumps(line) for line in made]


def ends_of(path: Path) -> tuple[dict[str, str], int]:
    """What each line's end was, without times and numbers of a call; and how many ends are not the first of a line."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    ends: dict[str, str] = {}
    for record in records:
        response = record.get("response")
        body = response["body"] if response else record
        end = (
            [choice["text"] for choice in body["choices"]] if "choices" in body else body.get("text", body.get("error"))
        )
        ends[str(record.get("custom_id", record.get("id")))] = json.dumps(end)
    return ends, len(records) - len(ends)


def num_lines_of(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def _end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return its exit code and output; one that does not end is ended, and that is an error."""
    try:
        _, said = process.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise RuntimeError(f"it has not ended within {_END_S:.0f} s") from None
    return process.returncode, said


def _cpu_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system
