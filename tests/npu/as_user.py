"""A user's commands in a process of their own: prints [exit code, output] of each as JSON.

    python tests/npu/as_user.py FOLDER NUM_DEVICES

FOLDER holds run.yaml, whose model does not exist. NUM_DEVICES: on the stub libraries, so many devices; `none` leaves
the process as it is.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from typing import Any

PROFILE = "ascend_910c_tp4_bp4"


def commands() -> dict[str, Callable[[], Any]]:
    from common.commands import job
    from common.commands.main import main as lopa_main

    def lopa(*arguments: str) -> None:
        sys.argv = ["lopa", *arguments]
        lopa_main()

    return {
        "lopa run": lambda: lopa("run", "--profile", PROFILE, "run.yaml"),
        "lopa doctor": lambda: lopa("doctor", "--profile", PROFILE),
        "lopa doctor --selftest": lambda: lopa("doctor", "--profile", PROFILE, "--selftest"),
        "scripts/run_batch.sh": lambda: sys.exit(job.main(["run", PROFILE, "run.yaml"])),
    }


def result_of(command: Callable[[], Any]) -> tuple[int, str]:
    """Run it in a fork, so that it may end as it likes, and return its result."""
    with tempfile.TemporaryFile() as printed:
        child = os.fork()
        if child == 0:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            command()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        return os.waitstatus_to_exitcode(status), printed.read().decode()


def main() -> None:
    folder, num_devices = sys.argv[1:]
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    if num_devices != "none":
        os.environ["LOPA_SIM_DEVICES"] = num_devices
        from sim import runtime

        runtime.load()
    for name in (
        "torch.distributed",
        "common.evaluation.sweep",
        "common.commands.doctor",
        "common.checkpoint.weights",
        "lopa_ascend.selftest.examine",
    ):
        import_module(name)  # once, for all forks
    os.chdir(folder)
    print(json.dumps({name: result_of(command) for name, command in commands().items()}))


if __name__ == "__main__":
    main()
