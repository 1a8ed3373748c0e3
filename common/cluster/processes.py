"""The engine's processes of one replica: started beside the actor, on the devices that Ray has given it."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import common
from common.config import DeviceProfile, RunConfig
from common.errors import EngineError, first_line
from common.platforms import platform_of
from common.processes import read_error_file

ORDER, SOCKET = "order", "socket"  # files of the folder that both sides know
_ERROR = "error.json"
_LOOK_S = 0.2
_END_S = 5.0


class Order(NamedTuple):
    """What the processes are to do. is_server: talk as the server's engine does, else take requests and give
    completions."""

    profile: DeviceProfile
    run: RunConfig
    is_server: bool


class EngineProcesses:
    """One process or, under torchrun, several, which end when the process that started them does."""

    def __init__(self, order: Order) -> None:
        self._folder = TemporaryDirectory(prefix="lopa_")
        folder = Path(self._folder.name)
        (folder / ORDER).write_bytes(pickle.dumps(order))
        self._error = folder / _ERROR
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / SOCKET))
        self._listening.listen(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._problem: str | None = None  # why there is no process
        self._is_started, self._has_ended = threading.Event(), threading.Event()
        # In a thread of their own: the kernel ends them with the thread that started them, and actors' come and go.
        threading.Thread(target=self._start_and_wait, args=(order.profile,), daemon=True).start()
        self._is_started.wait()

    def connect(self) -> socket.socket:
        """Wait for the first process, and return this end of the socket to it. Raises EngineError where it has
        ended, or could not be started."""
        waiting = select.poll()  # which takes descriptors of any number
        waiting.register(self._listening, select.POLLIN)
        while not waiting.poll(1000 * _LOOK_S):
            if self._has_ended.is_set():
                raise EngineError(self.why_ended())
        return self._listening.accept()[0]

    def why_ended(self) -> str:
        """Return the last words of processes that have ended, or are about to."""
        self._has_ended.wait(_END_S)
        if self._problem is not None:
            return self._problem
        if (said := read_error_file(self._error)) is not None:
            return said
        code = None if self._process is None else self._process.poll()
        if code is None:
            return "the engine has closed its socket and goes on: end its process"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
        return f"the engine's process {how}; the actor's log on its node says more"

    def close(self) -> None:
        """End the processes: at once, unless they end by themselves within seconds."""
        if self._process is not None and not self._has_ended.wait(_END_S):
            self._process.kill()
        self._listening.close()
        self._folder.cleanup()

    def _start_and_wait(self, profile: DeviceProfile) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "common.cluster.engine", self._folder.name],
                env=environment_of(profile, os.environ) | {"TORCHELASTIC_ERROR_FILE": str(self._error)},
                start_new_session=True,
            )
            self._is_started.set()
            self._process.wait()
        except Exception as error:  # `connect` tells it
            self._problem = f"the engine's process cannot be started: {first_line(error)}"
        finally:
            self._has_ended.set()
            self._is_started.set()


def environment_of(profile: DeviceProfile, own: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Return the variables of the engine's processes, of which Ray has set some of the actor's.

    Ray names a thread count, where the profile's is meant, and devices in any order, where CANN wants them ascending.
    """
    root, others = str(Path(common.__path__[0]).parent), own.get("PYTHONPATH", "").split(os.pathsep)
    found = {**own, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, (root, *others))))}
    found.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    if "OMP_NUM_THREADS" in profile.environment:
        found["OMP_NUM_THREADS"] = profile.environment["OMP_NUM_THREADS"]
    name = platform_of(profile).visible_devices_variable
    devices = found.get(name or "", "").split(",")
    if name is not None and all(device.isdecimal() for device in devices):
        found[name] = ",".join(sorted(devices, key=int))
    return found
