"""`scripts/soak.sh`: a server under mixed load and batch runs, one fault after another, for so many hours.

    python -m tests.soak HOURS [--profile cpu] [--out outputs/soak] [--replicas 2] ...

Prints a line a round, writes soak.json into the folder after each, and ends with 1 where a promise of
docs/reliability.md was broken. Ctrl-C ends everything; what has been counted is written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from tests.soak.asks import LOST_S, pool, send
from tests.soak.batches import Batches
from tests.soak.faults import Fault, Stage, faults
from tests.soak.load import Load
from tests.soak.looks import Looks
from tests.soak.machine import Clock, SmallDisk, device_settings
from tests.soak.report import result
from tests.soak.server import SoakedServer, wait_until


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak.sh", description=__doc__, formatter_class=_AsWritten)
    parser.add_argument("hours", type=float, help="up to 24")
    parser.add_argument("--profile", default="cpu", help="a file, or a name of configs/profiles, of one process")
    parser.add_argument("--out", type=Path, default=Path("outputs/soak"), help="the folder of soak.json and the logs")
    parser.add_argument("--replicas", type=int, default=2, help="of the server, a device or share of the cores each")
    parser.add_argument("--rate", type=float, default=0.8, help="requests a second")
    parser.add_argument("--every", type=float, default=45.0, help="seconds from one fault to the next, at least")
    parser.add_argument("--share", type=float, default=0.3, help="cores that batch runs take in the mean")
    parser.add_argument("--lines", type=int, default=24, help="lines of a batch run")
    parser.add_argument("--seed", type=int, default=0)
    found = parser.parse_args(arguments)
    if not 0 < found.hours <= 24 or min(found.replicas, found.rate, found.share, found.lines) <= 0:
        parser.error("HOURS: give a number from above 0 to 24; the other numbers are above 0")
    return found


class _AsWritten(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


class Soak:
    """Everything that runs, as contexts of `stack`, which ends it all."""

    def __init__(self, given: argparse.Namespace, home: Path, stack: ExitStack) -> None:
        self.given = given
        self._is_stopped = threading.Event()
        disks, clocks = ([kind(home, name) for name in ("server", "batches")] for kind in (SmallDisk, Clock))
        for disk in disks:
            stack.callback(disk.close)
        server = SoakedServer(
            disks[0].path, given.profile, given.replicas, clocks[0].environment, *device_settings(given.profile)
        )
        stack.callback(shutil.copyfile, server.log, given.out / "server.log")
        stack.push(server)  # before it begins: a start that fails is ended, too
        server.__enter__()
        server.wait_whole()
        asks = pool()
        expected = {place: send(server.port, ask).texts for place, ask in enumerate(asks)}
        self._began = time.monotonic()  # a first start, which compiles, is not counted
        self.load, self.looks = Load(server, expected, asks, given.rate), Looks(server, self._began)
        rng = random.Random(given.seed)
        self.batches = Batches(disks[1], clocks[1], given.profile, given.replicas, given.lines, rng)
        self.stage = Stage(server, self.load, disks[0], clocks[0], random.Random(given.seed))
        self.faults = faults(disks[0], given.replicas)
        stack.callback(self.batches.stop)
        stack.callback(self._is_stopped.set)
        stack.callback(self.write)

    def is_over(self) -> bool:
        return self._is_stopped.is_set() or time.monotonic() > self._began + 3600 * self.given.hours

    def run(self) -> int:
        """Return the exit code."""
        self.looks.sample_until(self.is_over)
        batches = threading.Thread(target=self.batches.run, args=(self.is_over, self.given.share), daemon=True)
        batches.start()
        for fault in itertools.cycle([fault for fault in self.faults if fault.why_not is None]):
            if self.is_over():
                break
            self._disturb(fault)
        batches.join(600)
        self.looks.compare_latency()
        if "Traceback" in self.stage.server.text:
            self.looks.broken.append("the server's log has a traceback")
        broken = self.write()
        print(*broken, sep="\n")
        return 1 if broken else 0

    def _disturb(self, fault: Fault) -> None:
        """One round: load, a fault amid it, whole again, idle, a look."""
        load, server, rng = self.load, self.stage.server, self.stage.rng
        ends_at = time.monotonic() + self.given.every
        load.begin(fault.name)
        num_before = len(load.seconds[fault.name])
        time.sleep(rng.uniform(4, 9))
        fault.act(self.stage)
        time.sleep(rng.uniform(4, 9))
        server.wait_whole()
        load.pause(LOST_S)
        self.looks.look(fault.name, load.seconds[fault.name][num_before:])
        counts, num_broken = dict(load.counts[fault.name]), len(self.write())
        print(f"{self.looks.hours():.3f} h: {fault.name}: {counts}, broken so far: {num_broken}", flush=True)
        wait_until(lambda: time.monotonic() > ends_at or self.is_over(), self.given.every)

    def write(self) -> list[str]:
        """Write what is known into soak.json, and return the sentences on what was broken."""
        broken = [*self.load.broken, *self.looks.broken, *self.batches.broken]
        missing = {fault.name: fault.why_not for fault in self.faults if fault.why_not is not None}
        made = result(
            command_of(self.given), self.looks.hours(), self.load.counts, self.batches.counts, self.looks.rounds,
            self.looks.samples, {"not tried": missing, "broken": broken},
        )  # fmt: skip
        parts = ",\n".join(f'"{name}": {json.dumps(part)}' for name, part in made.items())
        (self.given.out / "soak.json").write_text(f"{{\n{parts}\n}}\n")
        return broken


def command_of(given: argparse.Namespace) -> str:
    """What was given, but for the folder."""
    defaults = vars(parse([f"{given.hours:g}"]))
    said = [f"--{name} {value}" for name, value in vars(given).items() if value != defaults[name] and name != "out"]
    return " ".join(("scripts/soak.sh", f"{given.hours:g}", *said))


def main() -> int:
    given = parse(sys.argv[1:])
    given.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="lopa-soak-", ignore_cleanup_errors=True) as folder,
            ExitStack() as stack,
        ):
            return Soak(given, Path(folder), stack).run()
    except KeyboardInterrupt:
        print("lopa: stopped; what was counted is in soak.json", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
