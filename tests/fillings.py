"""Fillings of canvases that an automaton accepts, by the scheduler's loops. class_W: a class or MASK of a position."""

from __future__ import annotations

import numpy as np

from common.constraints import NEVER, Automaton
from common.decoding.scheduling.held.joint import best_path, drawn_path, find_alive, find_possible


def alive(own: Automaton, class_W: np.ndarray) -> np.ndarray | None:
    is_alive_WQ = np.zeros((len(class_W) + 1, own.num_states), np.bool_)
    return is_alive_WQ if find_alive(own.graph, class_W, len(class_W), own.start, 0, is_alive_WQ) else None


def best(own: Automaton, class_W: np.ndarray, weight_WC: np.ndarray, is_tail_free: bool = False) -> list[int]:
    width, is_alive_WQ, path_W = len(class_W), alive(own, class_W), np.zeros(len(class_W), np.int32)
    assert is_alive_WQ is not None
    is_possible_WC = np.zeros((width, own.num_classes), np.bool_)
    for place in range(width):
        find_possible(own.graph, is_alive_WQ, place, is_possible_WC[place])
    best_path(
        own.graph, own.end if is_tail_free else NEVER, class_W, width, own.start, is_alive_WQ, is_possible_WC,
        weight_WC, np.empty(width + 1), np.empty((2, own.num_states)), np.empty((2, own.num_states), np.int32),
        np.empty(len(own.graph.first_S1) - 1), np.empty(len(own.graph.first_S1) - 1, np.int32),
        np.empty((width, own.num_states), np.int32), path_W,
    )  # fmt: skip
    return path_W.tolist()


def drawn(
    own: Automaton, class_W: np.ndarray, weight_WC: np.ndarray, draws: np.random.Generator, is_tail_free: bool = False
) -> list[int]:
    width, is_alive_WQ, path_W = len(class_W), alive(own, class_W), np.zeros(len(class_W), np.int32)
    assert is_alive_WQ is not None
    drawn_path(
        own.graph, own.end if is_tail_free else NEVER, class_W, width, own.start, is_alive_WQ, weight_WC,
        draws.random(width), np.empty((width + 1, own.num_states)), path_W,
    )  # fmt: skip
    return path_W.tolist()
