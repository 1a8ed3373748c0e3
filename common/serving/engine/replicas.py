"""Several replicas of an engine behind one address, as one process starts them and looks after them.

    this process ─ starts ─> front ends, which share one listening socket, and replicas
    replica ─ connects to ─> every front end, at a socket of its own in a folder that is this user's alone

A replica is `lopa serve` of a profile with one replica, on its share of the devices and cores: its tp x bp ranks begin
and end together, and share nothing with other replicas. One that ends after it has taken requests is started again,
since what ends one (memory, a device that falls off) often is over by then and nobody has to get up for it. One that
fails at its first start ends the server, as it does without replicas: its cause is most often a setting.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from common.config import DeviceProfile, RunConfig, as_yaml
from common.errors import ConfigError, EngineError, first_line
from common.platforms import platform_of
from common.processes import cores_of, die_with_parent, drain_on_signals, read_error_file, resolve_mesh
from common.serving.engine.front import FrontEnd, check_serving, listen, start_front_end
from common.serving.engine.links import Links
from common.serving.link import Link, LinkClosed, wait_for_any
from common.serving.messages import Hello

logger = logging.getLogger(__name__)
FRONT_ENDS = "LOPA_FRONT_ENDS"  # set for a replica: the sockets that front ends listen to
REPLICA = "LOPA_REPLICA"  # and its number
_IN_FORCE = "LOPA_WEIGHTS_IN_FORCE"  # and the file that says which weights replaced those of the start
_POLL_S = 0.1
_LONGEST_WAIT_S = 60.0  # before the next start of a replica that fails again and again
_ENDING_S = 10.0


def starts_replicas(profile: DeviceProfile, run: RunConfig) -> bool:
    """Whether a server of these starts other processes and decodes nothing itself."""
    return resolve_mesh(profile).data_parallel_size > 1 or run.serve.num_front_ends > 1


def join_front_ends() -> Links:
    """Connect this replica to the front ends that the environment names."""
    links = []
    for path in os.environ[FRONT_ENDS].split(os.pathsep):
        own = socket.socket(socket.AF_UNIX)
        own.connect(path)
        links.append(Link(own))
        links[-1].send([Hello(int(os.environ[REPLICA]))])
    return Links(links)


def in_force() -> Path | None:
    """Return the file in which replicas note the weights that replaced those of the start; None without replicas."""
    path = os.environ.get(_IN_FORCE)
    return None if path is None else Path(path)


def serve_replicas(profile: DeviceProfile, run: RunConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError, or EngineError where a front end ends, or a replica does at
    its first start."""
    keys = check_serving(run.serve)
    number = resolve_mesh(profile).data_parallel_size
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lopa-serve-")))
        listening = stack.enter_context(listen(run.serve))
        paths = [folder / f"front{place}" for place in range(run.serve.num_front_ends)]
        shared = _shared_counts(folder) if len(paths) > 1 else {}
        front_ends = []
        for path in paths:
            with _meeting(path) as meeting:
                front_ends.append(start_front_end(run, keys, listening, meeting, number, shared))
            stack.callback(front_ends[-1].process.kill)
        listening.close()
        command, joined = _command(profile, run, folder), os.pathsep.join(map(str, paths))
        replicas = []
        for place in range(number):
            own = {FRONT_ENDS: joined, REPLICA: str(place), _IN_FORCE: str(folder / "weights.json")}
            own |= _share(profile, place, number)
            replicas.append(Replica(place, command, own, cores_of(place, number), folder / f"error{place}"))
            stack.callback(replicas[-1].kill)
            replicas[-1].start()
        Watch(front_ends, replicas).run()


def _meeting(path: Path) -> socket.socket:
    """Return a socket that replicas can connect to at any time. Raises ConfigError."""
    meeting = socket.socket(socket.AF_UNIX)
    try:
        meeting.bind(str(path))
    except OSError as error:
        raise ConfigError(
            f"{path}: no socket can be made there ({first_line(error)}); set TMPDIR to a short local folder"
        ) from None
    meeting.listen()
    return meeting


def _shared_counts(folder: Path) -> dict[str, str]:
    """Return the environment by which front ends count in files that they share."""
    counts = folder / "counts"
    counts.mkdir()
    return {"PROMETHEUS_MULTIPROC_DIR": str(counts)}


def _command(profile: DeviceProfile, run: RunConfig, folder: Path) -> list[str]:
    """Write what one replica runs into files of its own, and return what starts it."""
    alone = resolve_mesh(profile).model_copy(update={"data_parallel_size": 1})
    serve = run.serve.model_copy(update={"num_front_ends": 1})
    files = {
        "profile": as_yaml(profile.model_copy(update={"mesh": alone})),
        "run": as_yaml(run.model_copy(update={"serve": serve})),
    }
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return [sys.executable, "-m", "common.commands.job", "serve", *(str(folder / f"{name}.yaml") for name in files)]


def _share(profile: DeviceProfile, place: int, count: int) -> dict[str, str]:
    """Return the environment by which a replica sees its devices alone."""
    variable = platform_of(profile).visible_devices_variable
    if variable is None:
        return {}
    each = resolve_mesh(profile).num_processes // count
    given = [one.strip() for one in os.environ.get(variable, "").split(",") if one.strip()]
    visible = given or [str(device) for device in range(each * count)]
    return {variable: ",".join(visible[place * each : (place + 1) * each])}


@dataclass(slots=True)
class Replica:
    """The processes of one replica, over all of their starts.

    cores: those it may use; none: all. said: the file that holds its last words. num_failures: ends since it took
    requests last. start_at: when it is to be started again, by the monotonic clock; None: it runs.
    """

    number: int
    command: list[str]
    environment: dict[str, str]
    cores: list[int]
    said: Path
    was_ready: bool = False
    num_failures: int = 0
    start_at: float | None = None
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.said.unlink(missing_ok=True)
        self.start_at = None
        # A session of its own: a Ctrl-C of the terminal is this process's.
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, **self.environment, "TORCHELASTIC_ERROR_FILE": str(self.said)},
            start_new_session=True,
            preexec_fn=self._begin,
        )

    def _begin(self) -> None:
        die_with_parent()
        if self.cores:
            os.sched_setaffinity(0, self.cores)

    def kill(self) -> None:
        """End it at once; its ranks end with the process that has started them."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def take_ready(self) -> None:
        """Note that it takes requests, which every front end tells."""
        if self.num_failures or not self.was_ready:
            logger.info("replica %d is ready", self.number)
        self.was_ready, self.num_failures = True, 0

    def why_ended(self) -> str | None:
        """Return how it has ended; None while it runs."""
        code = None if self.process is None else self.process.poll()
        if code is None:
            return None
        if code < 0:
            return f"replica {self.number} was killed by {signal.Signals(-code).name}"
        said = read_error_file(self.said)
        return f"replica {self.number} ended with exit code {code}: {said or 'its own output is above'}"

    def wait_to_start(self, reason: str) -> None:
        """Note that it has ended, and when it is to be started again."""
        wait_s = min(_LONGEST_WAIT_S, 2.0**self.num_failures)
        self.num_failures += 1
        self.start_at, self.process = time.monotonic() + wait_s, None
        logger.error("%s; it is started again in %.0f s", reason, wait_s)


class Watch:
    """Looks after front ends and replicas until a signal has come and every client has its answer."""

    def __init__(self, front_ends: Sequence[FrontEnd], replicas: Sequence[Replica]) -> None:
        self._front_ends = front_ends
        self._replicas = replicas
        self._is_draining = False

    def run(self) -> None:
        """Raises EngineError where a front end ends, or a replica does before it has taken requests once."""
        drain_on_signals(self._drain)
        try:
            while not self._is_draining:
                wait_for_any([front_end.link for front_end in self._front_ends], _POLL_S)
                for front_end in self._front_ends:
                    self._hear(front_end)
                for replica in self._replicas:
                    _look_after(replica)
        except EngineError as error:
            for front_end in self._front_ends:
                front_end.fail(str(error))
            raise
        self._end()

    def _drain(self) -> None:
        self._is_draining = True
        for front_end in self._front_ends:
            front_end.drain()

    def _hear(self, front_end: FrontEnd) -> None:
        try:
            for message in front_end.link.receive():
                self._replicas[message.replica].take_ready()
        except LinkClosed:
            if not self._is_draining:
                raise EngineError(front_end.why_gone()) from None

    def _end(self) -> None:
        """Wait for the front ends, which end when every client has its answer, then for the replicas, which they tell
        so."""
        for front_end in self._front_ends:
            front_end.process.wait()
        deadline = time.monotonic() + _ENDING_S
        for replica in self._replicas:
            if replica.process is not None and replica.was_ready:
                with suppress(subprocess.TimeoutExpired):
                    replica.process.wait(max(0.0, deadline - time.monotonic()))


def _look_after(replica: Replica) -> None:
    """Start a replica again that has ended. Raises EngineError where it has never taken requests."""
    reason = replica.why_ended()
    if reason is not None and not replica.was_ready:
        raise EngineError(reason)
    if reason is not None:
        replica.wait_to_start(reason)
    elif replica.start_at is not None and time.monotonic() > replica.start_at:
        replica.start()
