"""What every engine needs around a forward pass, written once: loading the model, pages of KV memory, waiting for the
device with a deadline, times, floors, gathers, synthetic steps.
"""

from common.runtime.collectives import Gathers
from common.runtime.facts import facts_of
from common.runtime.fitting import check_decode, check_settings, check_strategy
from common.runtime.floors import REPEATS, matrix_size, measure_floors
from common.runtime.load import ModelLoader
from common.runtime.measured import MeasuredEngine
from common.runtime.memory import allocating
from common.runtime.paging import NO_SLOT, PagedCapacity, PagePool, PageTable, pages_for, slots_going_on
from common.runtime.schemes import linear_schemes, scheme_at_load
from common.runtime.times import PassTimes, Stopwatch
from common.runtime.waiting import DeviceEvent, explained, wait_until_done
from common.runtime.workload import (
    num_matrix_weights,
    num_weights_read,
    share_of_experts_hit,
    step_floors_ms,
    synthetic_plan,
)

__all__ = [
    "NO_SLOT",
    "REPEATS",
    "DeviceEvent",
    "Gathers",
    "MeasuredEngine",
    "ModelLoader",
    "PagePool",
    "PageTable",
    "PagedCapacity",
    "PassTimes",
    "Stopwatch",
    "allocating",
    "check_decode",
    "check_settings",
    "check_strategy",
    "explained",
    "facts_of",
    "linear_schemes",
    "matrix_size",
    "measure_floors",
    "num_matrix_weights",
    "num_weights_read",
    "pages_for",
    "scheme_at_load",
    "share_of_experts_hit",
    "slots_going_on",
    "step_floors_ms",
    "synthetic_plan",
    "wait_until_done",
]
