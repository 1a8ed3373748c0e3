"""Capture on Ascend. As on CUDA all graphs of a process share one memory pool; but attention takes its lengths as host
lists, which a capture freezes, so they are updated.

A replay waits, at each attention, for an event, and resets it. The replay is launched first. Where the lengths have
changed, which is when a block opens or commits, the tasks are written after it, one layer after another, an event each:
the device computes the first layer while the host writes the next layers' lengths. Where they have not, the events
alone are recorded. Since the host waits for a step's predictions before it prepares the next, nothing of this meets an
earlier replay that still runs.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphs.cann import told
from graphs.runner import CaptureRefused, Replay

Forward = Callable[..., Any]

# CANN's codes for a lack of what graphs use up (streams, events, notifies, models), its text, and what drivers before
# HDK 25.5.1 say.
_NO_ROOM = re.compile(r"\b2070(?:05|07|08|09|10)\b|stream resource|EL0009|sq cq", re.IGNORECASE)
_OLD_DRIVER = "sq cq"


class NpuCapture:
    """graphs.runner.Capture by torch.npu.NPUGraph.

    lengths: the attention's host lists of the coming capture or replay, by the operator's own names. updates: whether
    changed ones are written, and events recorded, after the replay's launch (`after`) or before it.
    """

    def __init__(self, updates: Literal["after", "before"] = "after") -> None:
        self._npu: Any = import_module("torch_npu").npu
        self._pool: Any = None
        self._replays: WeakSet[NpuReplay] = WeakSet()
        self.lengths: dict[str, list[int]] = {}
        self.updates = updates

    def __call__(self, work: Replay) -> Replay:
        self._npu.synchronize()
        if not self._replays:  # a pool ends with its last graph
            self._pool = self._npu.graph_pool_handle()
        graph = self._npu.NPUGraph()
        # thread_local: HCCL's watchdog thread may query its events meanwhile, which a global capture forbids.
        capturing = self._npu.graph(
            graph, pool=self._pool, auto_dispatch_capture=True, capture_error_mode="thread_local"
        )
        try:
            with capturing:
                work()
        except RuntimeError as error:
            _leave(capturing, graph)
            reason = _why_refused(error)
            if reason is None:
                raise
            raise CaptureRefused(reason) from error
        replay = NpuReplay(graph, self)
        self._replays.add(replay)
        return replay

    def allocated_bytes(self) -> int:
        return int(self._npu.memory_reserved())


def _why_refused(error: RuntimeError) -> str | None:
    """Return what the device lacks for another graph; None: the error is another. It may have come before the one that
    ends the capture."""
    for cause in filter(None, (error.__context__, error)):
        if _NO_ROOM.search(str(cause)):
            is_old = _OLD_DRIVER in str(cause).lower()
            return told(cause) + ("; a driver of HDK 25.5.1 or later has more room" if is_old else "")
    return None


def _leave(capturing: Any, graph: Any) -> None:
    """Leave the dispatch mode and the stream of a capture whose end raised, which torch_npu leaves entered."""
    if graph.graph_dispatch_mode in _get_current_dispatch_mode_stack():
        graph.graph_dispatch_mode.__exit__(None, None, None)
        capturing.stream_ctx.__exit__(None, None, None)


class NpuReplay:
    """num_updates: how often the attention's tasks were written anew."""

    def __init__(self, graph: Any, capture: NpuCapture) -> None:
        self.num_updates = 0
        self._graph = graph
        self._capture = capture
        self._lengths: dict[str, list[int]] = {}

    def __call__(self) -> None:
        if self._capture.updates == "before":
            self._release()
            self._graph.replay()
        else:
            self._graph.replay()
            self._release()

    def forget_lengths(self) -> None:
        """Have the next replay write them anew."""
        self._lengths = {}

    def _release(self) -> None:
        """Let the replay pass its attentions, with the lengths that they are to have."""
        attention = self._graph.graph_dispatch_mode
        if self._capture.lengths == self._lengths:
            for record in attention.graph_dispatch_records:
                record.event.record(attention.update_stream)
        elif attention.graph_dispatch_records:
            self._graph.update(cpu_update_input=[self._capture.lengths])
            self._lengths = self._capture.lengths
            self.num_updates += 1


class AsItIs:
    """graphs.runner.Capture for work that is launched as a whole already: a replay does the work again."""

    def __init__(self) -> None:
        self._npu: Any = import_module("torch_npu").npu
        self.lengths: dict[str, list[int]] = {}  # inputs of the work, so nobody looks at them here
        self.updates: Literal["after", "before"] = "before"

    def __call__(self, work: Replay) -> Replay:
        return work

    def allocated_bytes(self) -> int:
        return int(self._npu.memory_reserved())


def _forward_named(module: torch.nn.Module, name: str) -> Forward:
    """Return the module's forward with a code object of its own: Dynamo, and the cache of compiled graphs, take one
    code for one graph."""
    forward = type(module).forward
    code = forward.__code__.replace(co_name=f"forward_{name}")
    return MethodType(FunctionType(code, forward.__globals__, argdefs=forward.__defaults__), module)


class NpugraphEx:
    """Lets torch_npu's compiler fuse and schedule a module's forward, one shape at a time; `NpuCapture` then captures
    what it made.

    cache: a folder that keeps what was compiled across starts. torch_npu takes it from there without tracing and
    without any guard, so the folder must be of this code, these versions and this model, and `name` must tell all that
    the shape's inputs are specialised on.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache
        self._npu: Any = import_module("torch_npu").npu  # registers the backend as well

    def __call__(self, module: torch.nn.Module, name: str) -> Forward:
        forward = _forward_named(module, name)
        # force_eager: the backend compiles only, so that capture, its pool and its task updates stay in one place.
        options: dict[str, Any] = {"force_eager": True}
        if self._cache is None:
            compiled: Forward = torch.compile(
                forward, backend="npugraph_ex", fullgraph=True, dynamic=False, options=options
            )
            return compiled
        cached: Forward = self._npu.npugraph_ex.inference.cache_compile(
            forward, cache_dir=str(self._cache), dynamic=False, options=options
        )
        return cached


class Torchair:
    """Lets torchair lower a module's forward to a GE graph, one shape at a time; a call launches the whole graph, so
    nothing is left to capture.

    cache: as for NpugraphEx. It keeps the lowered graph; GE compiles it anew at every start.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache
        self._torchair: Any = import_module("torchair")
        self._config = self._torchair.CompilerConfig()
        # A launch need not tell GE where parameters lie. It tells where buffers lie, also those of a marked address:
        # Dynamo takes them for attributes of the graph, and torchair looks at its inputs only.
        warnings.filterwarnings("ignore", message="When enable frozen_parameter")
        self._config.experimental_config.frozen_parameter = True

    def __call__(self, module: torch.nn.Module, name: str) -> Forward:
        forward = _forward_named(module, name)
        if self._cache is None:
            backend = self._torchair.get_npu_backend(compiler_config=self._config)
            compiled: Forward = torch.compile(forward, backend=backend, fullgraph=True, dynamic=False)
            return compiled
        cached: Forward = self._torchair.inference.cache_compile(
            forward, config=self._config, dynamic=False, cache_dir=str(self._cache)
        )
        return cached
