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
from common.serving.engine.replicas import FRONT_ENDS, join_front_ends, serve_replicas, starts_replicas
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
        with generator.decoding() as core:
            while core.has_work:
                core.step()
        generator.close()
        return
    if FRONT_ENDS in os.environ:
        _serve_elsewhere(build)
        return
    keys = check_serving(run.serve)
    with listen(run.serve) as listening:
        front_end = start_front_end(run, keys, listening)
    try:
        _serve(Links([front_end.link]), build(), front_end.drain)
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
        _serve(links, build(), None)
    except LinkClosed:
        raise EngineError("the front end has ended") from None
    except Exception as error:
        links.send_last([Failed(_sentence(error))], LAST_WORDS_S)
        raise


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()) or repr(error)


def _serve(links: Links, generator: Generator, drain: Callable[[], None] | None) -> None:
    engine = CountedEngine(generator.engine)
    generator.engine = engine
    capacity = engine.capacity
    decode = generator.run.decode
    vocab_size = capacity.vocab_size or generator.model_config.vocab_size
    # From here on a signal ends nothing by itself: the front end lets its clients finish, then says that it is over.
    if drain is not None:
        drain_on_signals(drain)
    with generator.decoding() as core:
        links.send([Ready(decode, capacity.num_slots, capacity.max_model_len, vocab_size)])
        RequestLoop(core, engine, links).run()
    generator.close()
