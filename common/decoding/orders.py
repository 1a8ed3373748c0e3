"""What an engine does between requests, beside decoding: take other weights, give memory back and take it again.

Every rank of a replica carries an order out at the same place between two passes (`common.decoding.engine.carry_out`).
Orders that ranks are told of by their first one travel as pickles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
FIRST_VERSION = "0"  # of weights that nothing has replaced


class ReadWeights(NamedTuple):
    """Read other weights into the host's memory, beside those in force, check them, and take the device's memory for
    them if it was given back. PutWeights or DropWeights follows.

    source: a model folder, or tensors by the checkpoint's names.
    """

    source: str | Mapping[str, Any]


class PutWeights(NamedTuple):
    """Put what was read last in force. version: what these weights are called; None: by the next number."""

    version: str | None = None


class DropWeights(NamedTuple):
    """Forget what was read, and give back what was taken for it."""


class ReleaseMemory(NamedTuple):
    """Give memory back. Weights are forgotten, and so is all KV."""

    tags: tuple[Tag, ...] = TAGS


class TakeMemory(NamedTuple):
    """Take memory again, and read the weights that belong there from the folder that they came from. Part of
    ResumeMemory: what one rank may fail at, before anything is changed."""

    tags: tuple[Tag, ...] = TAGS


class ResumeMemory(NamedTuple):
    """Take memory again, weights included, and go on. `carry_out` has every rank obey TakeMemory first."""

    tags: tuple[Tag, ...] = TAGS


class ForgetKV(NamedTuple):
    """Use no KV of earlier requests again, which every order does."""


Order = ReadWeights | PutWeights | DropWeights | ReleaseMemory | TakeMemory | ResumeMemory | ForgetKV
