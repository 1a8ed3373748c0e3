"""`lopa serve`, from one of its processes: start the front end, load the model, decode until it is over."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.config import DeviceProfile, RunConfig
from common.errors import EngineError
from common.processes import drain_on_signals, global_rank
from common.serving.engine.front import LAST_WORDS_S, check_serving, listen, start_front_end
from common.serving.engine.links import Links
from common.serving.engine.loop import RequestLoop
from common.serving.engine.passes import CountedEngine
from common.serving.engine.replicas import FRONT_ENDS, in_force, join_front_ends, serve_replicas, starts_replicas
from common.serving.link import LinkClosed
from common.serving.messages import Failed, Ready

if TYPE_CHECKING:
    from common.generate import Generator


def serve(profile: DeviceProfile, run: RunConfig, build: Callable[[], Generator]) -> None:
    """Answer requests over HTTP until SIGTERM or SIGINT; every rank runs this, and so does the process that starts
    replicas.

    build: loads the model. Raises ConfigError for what does not fit, EngineError where a device, a peer or the front
    end fails; clients have been told by then.
    """
    if starts_replicas(profile, run):
        serve_replicas(profile, run)
        return
    if global_rank() != 0:
        generator = build()
        drain_on_signals(lambda: None)  # rank 0 says when it is over
        generator.follow()
        generator.close()
        return
    if FRONT_ENDS in os.environ:
        _serve_elsewhere(build)
        return
    keys = check_serving(run.serve)
    with listen(run.serve) as listening:
        front_end = start_front_end(run, keys, listening)
    try:
        answer_requests(build(), Links([front_end.link]), front_end.drain)
    except LinkClosed:
        raise EngineError(front_end.why_gone()) from None
    except Exception as error:
        front_end.fail(_sentence(error))
        raise
    except BaseException:  # stopped
        front_end.drain()
        front_end.wait()
        raise
    front_end.wait()


def _serve_elsewhere(build: Callable[[], Generator]) -> None:
    """Answer what front ends send that another process has started. A signal ends this replica at once."""
    links = join_front_ends()
    try:
        answer_requests(build(), links)
    except LinkClosed:
        raise EngineError("the front end has ended") from None
    except Exception as error:
        links.send_last([Failed(_sentence(error))], LAST_WORDS_S)
        raise


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()) or repr(error)


def answer_requests(generator: Generator, links: Links, drain: Callable[[], None] | None = None) -> None:
    """Decode what front ends ask for until they say that it is over, on rank 0; then close the engine.

    drain: on a signal, which ends nothing by itself from here on: the front end lets its clients finish. Raises
    EngineError where the engine is gone, LinkClosed where a front end is.
    """
    engine = CountedEngine(generator.engine)
    generator.engine = engine
    if drain is not None:
        drain_on_signals(drain)
    with generator.decoding() as core:
        loop = RequestLoop(core, engine, links, in_force())
        loop.control.catch_up()
        links.send([Ready.of(generator)])
        loop.run()
    generator.close()
