"""How a step runs on a device, as far as that is the same on all: the engine with its two halves of a pass, pages of KV
memory, collectives, waiting with a deadline, times, floors; and the model, loaded, replaced and given back.

Engine packages subclass `engine.DeviceEngine` over their kernels and their KV memory.
"""

from common.runtime.classes.tiles import Tiles, class_statistics
from common.runtime.collectives import Collectives
from common.runtime.engine import DeviceEngine
from common.runtime.facts import facts_of
from common.runtime.fitting import check_decode, check_settings, check_strategy, longest_request
from common.runtime.floors import REPEATS, matrix_size, measure_floors
from common.runtime.memory import allocating_kv, pages_within
from common.runtime.paging.pool import NO_SLOT, PagedCapacity, PagePool, pages_for, slots_going_on
from common.runtime.paging.prefixes import PrefixCache
from common.runtime.paging.table import PageTable
from common.runtime.reads import ReadBuffers, ReadsKey
from common.runtime.upload import Upload
from common.runtime.waiting import DeviceEvent, wait_until_done
from common.runtime.weights.holdings import Holdings
from common.runtime.weights.load import ModelLoader
from common.runtime.weights.schemes import linear_schemes, scheme_at_load
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
    "Collectives",
    "DeviceEngine",
    "DeviceEvent",
    "Holdings",
    "ModelLoader",
    "PagePool",
    "PageTable",
    "PagedCapacity",
    "PrefixCache",
    "ReadBuffers",
    "ReadsKey",
    "Tiles",
    "Upload",
    "allocating_kv",
    "check_decode",
    "check_settings",
    "check_strategy",
    "class_statistics",
    "facts_of",
    "linear_schemes",
    "longest_request",
    "matrix_size",
    "measure_floors",
    "num_matrix_weights",
    "num_weights_read",
    "pages_for",
    "pages_within",
    "scheme_at_load",
    "share_of_experts_hit",
    "slots_going_on",
    "step_floors_ms",
    "synthetic_plan",
    "wait_until_done",
]
