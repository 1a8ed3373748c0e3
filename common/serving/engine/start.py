"""`lopa serve`, from one of its processes: start the front end, load the model, decode until it is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from common.config import DeviceProfile, RunConfig
from common.errors import ConfigError, EngineError
from common.processes import drain_on_signals, global_rank, resolve_mesh
from common.serving.engine.front import FrontEnd, check_serving, start_front_end
from common.serving.engine.loop import RequestLoop
from common.serving.engine.passes import CountedEngine
from common.serving.link import LinkClosed
from common.serving.messages import Ready

if TYPE_CHECKING:
    from common.generate import Generator


def serve(profile: DeviceProfile, run: RunConfig, build: Callable[[], Generator]) -> None:
    """Answer requests over HTTP until SIGTERM or SIGINT; every rank runs this.

    build: loads the model. Raises ConfigError for what does not fit, EngineError where a device, a peer or the front
    end fails; clients have been told by then.
    """
    keys = check_serving(run.serve) if global_rank() == 0 else ()
    if resolve_mesh(profile).data_parallel_size > 1:
        raise ConfigError(
            f"profile {profile.name}: lopa serve runs one replica; set mesh.data_parallel_size to 1, start a server a "
            "replica and put a load balancer in front"
        )
    if global_rank() != 0:
        generator = build()
        drain_on_signals(lambda: None)  # rank 0 says when it is over
        with generator.decoding() as core:
            while core.has_work:
                core.step()
        generator.close()
        return
    front_end = start_front_end(run, keys)
    try:
        _serve(front_end, build())
    except LinkClosed:
        raise EngineError(front_end.why_gone()) from None
    except Exception as error:
        front_end.fail(" ".join(str(error).split()) or repr(error))
        raise
    except BaseException:  # stopped
        front_end.drain()
        front_end.wait()
        raise
    front_end.wait()


def _serve(front_end: FrontEnd, generator: Generator) -> None:
    engine = CountedEngine(generator.engine)
    generator.engine = engine
    capacity = engine.capacity
    decode = generator.run.decode
    vocab_size = capacity.vocab_size or generator.model_config.vocab_size
    # From here on a signal ends nothing by itself: the front end lets its clients finish, then says that it is over.
    drain_on_signals(front_end.drain)
    with generator.decoding() as core:
        front_end.link.send([Ready(decode, capacity.num_slots, capacity.max_model_len, vocab_size)])
        RequestLoop(core, engine, front_end.link).run()
    generator.close()
