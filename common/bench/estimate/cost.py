"""Operations and hardware in, milliseconds out: a roofline for every kernel, latency and volume for every collective.

kernel      overhead + max(bytes / (bandwidth * share), operations / (matrix rate * share * busy units)),
            and at least what the host takes to launch it where it is not captured
collective  latency + bytes on the wire / link
lengths     what the host says of them while the device waits
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from common.bench.estimate.hardware import Figure, Hardware
from common.bench.estimate.operations import LAYER_PARTS, PARTS, Collective, HostWork, Kernel, Operation
from common.bench.estimate.record import record_step
from common.bench.estimate.setup import Setup


@dataclass(frozen=True, slots=True)
class Cost:
    """What a part of a step costs. seconds_of: by memory, matrix, launch, link, latency and host; they add up."""

    part: str
    num_bytes: float
    num_kernels: float
    seconds_of: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.seconds_of.values())

    @property
    def limit(self) -> str:
        return max(self.seconds_of, key=lambda name: self.seconds_of[name]) if self.seconds_of else "-"


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step by part, in the order of PARTS. weight_bytes: read by a rank; its embedding table comes on top."""

    setup: Setup
    parts: tuple[Cost, ...]
    weight_bytes: float

    @property
    def ms(self) -> float:
        return sum(part.seconds for part in self.parts) * 1e3

    def without(self, *names: str) -> float:
        """Milliseconds of all parts but these."""
        return sum(part.seconds for part in self.parts if part.part not in names) * 1e3

    @property
    def seconds_of(self) -> dict[str, float]:
        """Seconds by what they go to, as in Cost, the longest first."""
        found = _sum("step", self.parts).seconds_of
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all requests of one replica."""
        return self.setup.tokens_per_step * self.setup.num_requests / self.ms * 1e3


def estimate_step(setup: Setup, hardware: Hardware) -> StepCost:
    """Estimate one step. Raises ConfigError where the hardware's file lacks what it needs."""
    operations: Sequence[Operation] = record_step(setup)
    weight_bytes = sum(operation.weight_bytes for operation in operations if isinstance(operation, Kernel))
    if setup.hides_all_reduce:
        operations = prefetched(operations, hardware, setup.prefetch_bytes)
    by_part = defaultdict(list)
    for operation in operations:
        by_part[operation.part].append(price(operation, hardware, is_captured=setup.is_captured))
    layers_s = sum(cost.seconds for part in LAYER_PARTS for cost in by_part[part])
    if setup.is_captured and (waited_s := _lengths_s(setup, hardware, layers_s)):
        by_part["lengths"].append(Cost("lengths", 0, 0, {"host": waited_s}))
    return StepCost(setup, tuple(_sum(part, by_part[part]) for part in PARTS if by_part[part]), weight_bytes)


def _lengths_s(setup: Setup, hardware: Hardware, layers_s: float) -> float:
    """Return the seconds that a step waits on average for what the host says of attention lengths: new ones, or that
    they are as they were. Said after the launch, a layer's are hidden by the layers before it: the first remains, and
    what the host is slower than the device."""
    num_layers, waited_s = setup.model.num_layers, 0.0
    for order, figure, share in (
        (setup.length_updates, hardware.length_update_us, setup.length_changes),
        (setup.length_events, hardware.length_event_us, 1 - setup.length_changes),
    ):
        if order is not None and figure is not None:
            layer_s = figure.value * 1e-6
            hidden_s = min((num_layers - 1) * layer_s, layers_s * (num_layers - 1) / num_layers)
            waited_s += share * (num_layers * layer_s - (hidden_s if order == "after" else 0.0))
    return waited_s


def price(operation: Operation, hardware: Hardware, *, is_captured: bool = True) -> Cost:
    match operation:
        case HostWork():
            return Cost(operation.part, 0, 0, {"host": hardware.host_us.value * 1e-6})
        case Collective():
            return _price_collective(operation, hardware)
        case Kernel():
            return _price_kernel(operation, hardware, is_captured=is_captured)


def prefetched(operations: Sequence[Operation], hardware: Hardware, most: float) -> list[Operation]:
    """The same, where each all-reduce's time is used to pull the beginning of the next weight, at most `most` bytes of
    it, into L2."""
    found = list(operations)
    for index, operation in enumerate(found):
        if not isinstance(operation, Collective) or operation.name != "all_reduce":
            continue
        follower = next((n for n in range(index, len(found)) if getattr(found[n], "weight_bytes", 0)), None)
        if follower is not None:
            kernel = found[follower]
            assert isinstance(kernel, Kernel), "only kernels have weights"
            in_time = price(operation, hardware).seconds * _bandwidth(kernel, hardware)
            room = min(most, hardware.l2_mb.value * 1e6, in_time)
            moved = min(kernel.weight_bytes, room)
            found[follower] = replace(kernel, read=kernel.read - moved, weight_bytes=kernel.weight_bytes - moved)
    return found


def _price_kernel(kernel: Kernel, hardware: Hardware, *, is_captured: bool) -> Cost:
    num_bytes = kernel.read + kernel.written
    memory_s = num_bytes / _bandwidth(kernel, hardware)
    matrix_s = kernel.flops / _rate(kernel, hardware) if kernel.flops else 0.0
    limit, busy_s = ("matrix", matrix_s) if matrix_s > memory_s else ("memory", memory_s)
    figure = hardware.vector_kernel_us if kernel.kind == "other" else hardware.matrix_kernel_us
    launch_s = figure.value * 1e-6
    if not is_captured:
        launch_s = max(launch_s, hardware.eager_kernel_us.value * 1e-6 - busy_s)
    seconds_of = {"launch": launch_s * kernel.times, limit: busy_s * kernel.times}
    return Cost(kernel.part, num_bytes * kernel.times, kernel.times, seconds_of)


def _price_collective(collective: Collective, hardware: Hardware) -> Cost:
    on_wire, times, link = _bytes_on_wire(collective), collective.times, hardware.link(collective.span)
    link_s = on_wire / (link.gb_s.value * 1e9)
    latency = _latency_us(collective, hardware) * 1e-6
    return Cost(collective.part, on_wire * times, times, {"latency": latency * times, "link": link_s * times})


def _latency_us(collective: Collective, hardware: Hardware) -> float:
    if collective.is_on_ai_cpu and hardware.ai_cpu_all_reduce_us is not None:
        return hardware.ai_cpu_all_reduce_us.value
    if collective.name == "all_reduce" and collective.num_ranks == 2 and hardware.all_reduce_of_two_us is not None:
        return hardware.all_reduce_of_two_us.value
    own: Figure = getattr(hardware, f"{collective.name}_us")
    hop = hardware.link(collective.span).hop_us
    num_hops = (2 if collective.name == "all_reduce" else 1) * (collective.num_ranks - 1)  # of a ring
    return own.value + (num_hops * hop.value if hop is not None else 0.0)


def _bytes_on_wire(collective: Collective) -> float:
    """Return the bytes that each rank's link carries one way."""
    n, size = collective.num_ranks, collective.size
    return {"all_reduce": 2 * (n - 1) / n * size, "all_gather": (n - 1) * size, "broadcast": size}[collective.name]


def _bandwidth(kernel: Kernel, hardware: Hardware) -> float:
    share = hardware.other_memory_share.value
    if kernel.kind == "linear":
        share = hardware.of_dtype(hardware.linear_memory_share, kernel.dtype)
    return hardware.memory_tb_s.value * 1e12 * share


def _rate(kernel: Kernel, hardware: Hardware) -> float:
    rate = hardware.of_dtype(hardware.matrix_tflops, kernel.dtype) * 1e12
    if kernel.kind == "linear":
        return rate * hardware.linear_matrix_share.value
    busy = 1.0 if kernel.num_pieces is None else min(1.0, kernel.num_pieces / hardware.num_units.value)
    return rate * hardware.attention_matrix_share.value * busy


def _sum(part: str, costs: Iterable[Cost]) -> Cost:
    costs = list(costs)
    seconds_of: dict[str, float] = defaultdict(float)
    for cost in costs:
        for name, seconds in cost.seconds_of.items():
            seconds_of[name] += seconds
    return Cost(part, sum(cost.num_bytes for cost in costs), sum(cost.num_kernels for cost in costs), dict(seconds_of))
