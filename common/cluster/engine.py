"""A process of a replica's engine: `python -m common.cluster.engine FOLDER`, started by `processes.EngineProcesses`.

Where the profile wants several, the first becomes torchrun's agent and starts them. Rank 0 talks to the actor.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from common.cluster.options import processes_of
from common.cluster.processes import ORDER, SOCKET, Order
from common.errors import ConfigError, EngineError, what_failed
from common.processes import (
    Nodes,
    die_with_launcher,
    die_with_parent,
    global_rank,
    log_to_stderr,
    say,
    supervise,
    torchrun_options,
    write_error_file,
)
from common.serving import Link, LinkClosed, Links, Ready, answer_requests
from quant.errors import QuantizationError

if TYPE_CHECKING:
    from common.generate import Generator

_IDLE_S = 0.2  # the other ranks of a replica hear of rank 0 so often


def main(folder: Path) -> int:
    """The exit code."""
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    if is_rank:
        die_with_launcher()
    else:
        die_with_parent()
    log_to_stderr(time=True)
    order: Order = pickle.loads((folder / ORDER).read_bytes())
    count = processes_of(order.profile)
    try:
        if count > 1 and not is_rank:
            options = torchrun_options(Nodes(), count)
            return supervise([*options, "-m", "common.cluster.engine", str(folder)])
        run_rank(order, folder)
    except LinkClosed:  # the actor is gone
        return 1
    except (ConfigError, QuantizationError, EngineError, OSError) as error:
        sentence = what_failed(error)
        write_error_file(sentence)
        say(sentence)
        return 2
    return 0


def run_rank(order: Order, folder: Path) -> None:
    """Load the model and decode until the actor wants no more. Raises as an engine does, LinkClosed on rank 0."""
    link: Link | None = None
    if global_rank() == 0:
        own = socket.socket(socket.AF_UNIX)
        own.connect(str(folder / SOCKET))
        link = Link(own)
    from common.generate import build_generator

    generator = build_generator(order.profile, order.run)
    if link is None:
        generator.follow()
        generator.close()
    elif order.is_server:
        answer_requests(generator, Links([link]))
    else:
        decode_arriving(generator, link)


def decode_arriving(generator: Generator, link: Link) -> NoReturn:
    """Decode what comes over the link, and send back each result as it ends. Raises LinkClosed at the end."""
    link.send([Ready.of(generator)])
    has_peers = generator.engine.mesh.relay is not None
    with generator.decoding() as core:
        while True:
            for request in link.receive(0.0 if core.has_work else _IDLE_S):
                core.add_request(request)
            outputs = core.step() if has_peers or core.has_work else []
            link.send([output.result for output in outputs if output.result is not None])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
