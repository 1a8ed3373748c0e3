"""Measured numbers that the engine decides by, read from configs/machines/h200.yaml and checked."""

from __future__ import annotations

from common.config import Frozen, load_yaml, machine_file


class AllReduce(Frozen):
    one_shot_bytes: int
    two_shot_bytes: int


class Exchange(Frozen):
    tokens_of_two_ranks: int
    tokens_of_more: int
    stacked_values: int


class Attention(Frozen):
    few_programs: tuple[tuple[int, int, int], ...]
    split_programs: int
    stages: int
    stages_of_256: int
    long_tokens: int


class Machine(Frozen):
    """The file explains each number."""

    knee_tokens: float
    least_saved_tokens: int
    all_reduce: AllReduce
    exchange: Exchange
    attention: Attention


MACHINE = load_yaml(machine_file("h200"), Machine)
