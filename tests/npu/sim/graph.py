"""NPU graphs without a device: capture records, replay runs the record again, task updates exchange recorded arguments.

As on a device, capture leaves memory as it was and runs no collective, results exist after the first replay only, and
host values (length lists, shapes) are frozen. A replay that meets an ExternalEvent nobody recorded waits for it;
issuing other work meanwhile raises, where a device would hang.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from sim import collectives, contract, table
from sim.calls import Call, SimulationError, host_view, rebuild

_READS_ON_HOST = {"aten::_local_scalar_dense", "aten::equal", "aten::item", "aten::masked_select", "aten::nonzero"}


@dataclass
class Entry:
    """One step of a tape: an operator with its result, or an event to wait for or to reset."""

    kind: Literal["operator", "wait", "reset"]
    call: Call | None = None
    result: Any = None
    event: Any = None


Tape = list[Entry]
_is_recorded: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
# Handles stay alive here, so that their ids stay unique.
_groups: dict[int, tuple[Any, Tape]] = {}


class GraphState:
    """What a device is in the middle of: nothing, a capture, a task update, or a replay that waits."""

    def __init__(self) -> None:
        self.capture: Capture | None = None
        self.update: TaskUpdate | None = None
        self.waiting: tuple[Any, Iterator[Entry]] | None = None

    def refuse_if_blocked(self, call: Call) -> None:
        if self.waiting is not None and call.npu and not call.changes_nothing:
            raise SimulationError(
                f"{call.name} while a replay waits for an ExternalEvent: a device would hang; "
                "issue the task update and record the event first"
            )


class Capture:
    """Records operators without running them: their results have shapes but no contents until the first replay."""

    def __init__(self) -> None:
        self.tape: Tape = []
        self.group: Tape | None = None
        self._num_collectives = 0

    def run(self, call: Call) -> Any:
        if not call.npu and call.target is None:
            return call.func(*call.args, **call.kwargs)
        _refuse_host_traffic(call)
        result = self._result(call)
        entry = Entry("operator", call, result)
        self.tape.append(entry)
        if self.group is not None and not call.func.is_view:
            self.group.append(entry)
        return result

    def _result(self, call: Call) -> Any:
        if call.changes_nothing:
            result = call.func(*call.args, **call.kwargs)
            if call.is_allocation:
                _poison(host_view(result))
            return result
        if collectives.is_collective(call):
            self._num_collectives += 1
            if call.func.namespace == "c10d":
                return collectives.capture(call, self._num_collectives)
            collectives.mark(call, self._num_collectives)
        return _outputs_without_contents(call)


def _outputs_without_contents(call: Call) -> Any:
    """What the meta kernel says comes out; an argument that is returned is the argument itself."""
    device = call.npu[0].device if call.npu else call.target
    given: dict[int, Tensor] = {}

    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            meta = leaf.to("meta")
            given[id(meta)] = leaf
            return meta
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    args, kwargs = call.mapped(to_meta)
    leaves, structure = tree_flatten(_run_on_meta(call, args, kwargs))
    placed = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in given:
            fresh = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
            _poison(host_view(fresh))
            leaf = fresh
        placed.append(given.get(id(leaf), leaf))
    return rebuild(placed, structure)


def _run_on_meta(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "out" in kwargs:
        return tuple(kwargs["out"])
    if call.func.namespace == "atb":
        return None  # without meta kernels; the one that is used returns nothing
    if call.func.namespace == "npu" and not contract.has_meta_kernel(call.name):
        return table.execute(call.name, args, kwargs)
    kwargs.pop("pin_memory", None)
    return call.func(*args, **kwargs)


class TaskUpdate:
    """Between graph_task_update_begin and _end: each operator replaces the arguments of a recorded one."""

    def __init__(self, entries: Tape) -> None:
        self._entries = entries
        self._count = 0

    def take(self, call: Call) -> Any:
        if self._count == len(self._entries):
            raise SimulationError(f"task update issues {call.name}, more operators than were captured")
        entry = self._entries[self._count]
        recorded = entry.call
        assert recorded is not None
        if recorded.func is not call.func:
            raise SimulationError(f"task update issues {call.name}, captured was {recorded.name}")
        for old, new in zip(recorded.npu, call.npu, strict=True):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise SimulationError(f"task update of {call.name} changes {list(old.shape)} to {list(new.shape)}")
        for old, new in zip(recorded.written(), call.written(), strict=True):
            if old.data_ptr() != new.data_ptr():
                raise SimulationError(f"task update of {call.name} writes to other memory than the captured one")
        entry.call = call
        self._count += 1
        return entry.result

    def finish(self) -> None:
        if self._count != len(self._entries):
            raise SimulationError(f"task update issued {self._count} of {len(self._entries)} captured operators")


def replay(tape: Tape) -> None:
    if _state().waiting is not None:
        raise SimulationError("replay while the previous replay still waits for an ExternalEvent")
    _continue(iter(tape))


def _continue(entries: Iterator[Entry]) -> None:
    state = _state()
    state.waiting = None
    for entry in entries:
        if entry.kind == "wait" and not _is_recorded.get(entry.event):
            state.waiting = entry.event, entries
            return
        if entry.kind == "reset":
            _is_recorded[entry.event] = False
        elif entry.kind == "operator":
            _repeat(entry)


def _repeat(entry: Entry) -> None:
    call = entry.call
    assert call is not None
    if call.changes_nothing:
        return
    again = _device().execute(call)
    for old, new in zip(tree_flatten(entry.result)[0], tree_flatten(again)[0], strict=True):
        if isinstance(old, Tensor):
            if old.device.type == "npu" and old.numel() and old.data_ptr() != new.data_ptr():
                host_view(old).copy_(host_view(new))
        elif hasattr(new, "wait") and call.func.namespace == "c10d":
            new.wait()


def _refuse_host_traffic(call: Call) -> None:
    if call.npu and call.name in _READS_ON_HOST:
        raise SimulationError(f"{call.name} reads device data on the host: not capturable")
    if call.name not in ("aten::_to_copy", "aten::copy_"):
        return
    other = call.args[1].device if call.name == "aten::copy_" else call.kwargs.get("device")
    if other is not None and torch.device(other).type != call.args[0].device.type:
        raise SimulationError(f"{call.name} copies between host and device: not capturable")


def _poison(host: Tensor) -> None:
    if host.dtype.is_floating_point:
        host.fill_(float("nan"))
    elif host.dtype != torch.bool:
        host.fill_(torch.iinfo(host.dtype).min)


def _device() -> Any:
    from sim.device import current

    return current()


def _state() -> GraphState:
    return _device().graphs


@cache
def install() -> None:
    """Let torch_npu's graph classes drive the simulation; once per process."""
    _patch_graph(torch.npu.NPUGraph)
    _patch_events(torch.npu.ExternalEvent)
    # Not `import ... as`: that reads an attribute, which a GE export leaves pointing at a copy of the module.
    _patch_task_groups(import_module("torch_npu.npu.graphs"))


def _patch_graph(kind: Any) -> None:
    native_begin, native_end = kind.capture_begin, kind.capture_end

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        state = _state()
        if state.capture is not None:
            raise SimulationError("a graph capture is already under way")
        native_begin(self, *args, **kwargs)
        state.capture = Capture()

    def capture_end(self: Any) -> None:
        state = _state()
        capture, state.capture = state.capture, None
        self.simulated_tape = capture.tape
        native_end(self)

    def run(self: Any) -> None:
        tape = getattr(self, "simulated_tape", None)
        if tape is None:
            raise SimulationError("replay of a graph that was not captured")
        replay(tape)
        if os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1" and _state().waiting is not None:
            raise SimulationError("ASCEND_LAUNCH_BLOCKING: replay() waits for the device, which waits for an event")

    kind.capture_begin, kind.capture_end, kind.replay = capture_begin, capture_end, run


def _patch_events(kind: Any) -> None:
    native_wait, native_reset, native_record = kind.wait, kind.reset, kind.record

    def wait(self: Any, *args: Any, **kwargs: Any) -> None:
        native_wait(self, *args, **kwargs)
        capture = _state().capture
        if capture is not None:
            _is_recorded.setdefault(self, False)
            capture.tape.append(Entry("wait", event=self))

    def reset(self: Any, *args: Any, **kwargs: Any) -> None:
        native_reset(self, *args, **kwargs)
        capture = _state().capture
        if capture is not None:
            capture.tape.append(Entry("reset", event=self))
        else:
            _is_recorded[self] = False

    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        native_record(self, *args, **kwargs)
        if _is_recorded.get(self):
            raise SimulationError("an ExternalEvent is recorded again before a replay has waited for it: it is lost")
        _is_recorded[self] = True
        waiting = _state().waiting
        if waiting is not None and waiting[0] is self:
            _continue(waiting[1])

    kind.wait, kind.reset, kind.record = wait, reset, record


def _patch_task_groups(graphs: Any) -> None:
    native_begin, native_end = graphs._graph_task_group_begin, graphs._graph_task_group_end

    def group_begin(stream: Any) -> None:
        capture = _state().capture
        if capture is None or capture.group is not None:
            raise SimulationError("graph_task_group_begin outside of a capture, or twice")
        native_begin(stream)
        capture.group = []

    def group_end(stream: Any) -> Any:
        capture = _state().capture
        if capture is None or capture.group is None:
            raise SimulationError("graph_task_group_end without begin")
        handle = native_end(stream)
        _groups[id(handle)], capture.group = (handle, capture.group), None
        return handle

    def update_begin(stream: Any, handle: Any) -> None:
        if id(handle) not in _groups:
            raise SimulationError("graph_task_update_begin with an unknown handle")
        _state().update = TaskUpdate(_groups[id(handle)][1])

    def update_end(stream: Any) -> None:
        state = _state()
        update, state.update = state.update, None
        if update is None:
            raise SimulationError("graph_task_update_end without begin")
        update.finish()

    graphs._graph_task_group_begin, graphs._graph_task_group_end = group_begin, group_end
    graphs._graph_task_update_begin, graphs._graph_task_update_end = update_begin, update_end
