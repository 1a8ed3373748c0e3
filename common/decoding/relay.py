"""What rank 0 tells the other ranks of its replica at every step: who comes, who goes, and what it has planned."""

from __future__ import annotations

import zlib
from typing import Literal, NamedTuple, Protocol

from common.decoding.orders import Order
from common.decoding.plan import StepPlan
from common.decoding.request import GenerationRequest

Hold = Literal["", "requests", "passes"]  # nothing; no request is let in; no pass is started either


class Command(NamedTuple):
    """added: in the order in which they wait. aborted: ids. digest: of the pass under way. is_over: no step follows.
    held: what does not go on in this step. order: to be carried out in it. seconds: that the last finished pass took,
    from the end of the one before it; None where the device waited in between."""

    added: tuple[GenerationRequest, ...] = ()
    aborted: tuple[str, ...] = ()
    digest: int = 0
    is_over: bool = False
    held: Hold = ""
    order: Order | None = None
    seconds: float | None = None


class Relay(Protocol):
    """Carries rank 0's commands to the other ranks of its replica."""

    def exchange(self, command: Command, step: int) -> Command:
        """Return rank 0's command on every rank. All call it at every step, while the device computes.

        step: how many passes have been finished. Raises EngineError naming rank and step where a rank is gone.
        """

    def gather(self, said: str | None) -> list[str | None]:
        """Return what every rank of the replica has to say, by rank. Raises EngineError where one is gone."""


def digest_of(plan: StepPlan | None) -> int:
    """Return a checksum of the plan; 0 if no pass is under way."""
    if plan is None:
        return 0
    digest = 0
    for row in (*plan.entries_3T, *plan.row_fields_8R):
        digest = zlib.crc32(row, digest)
    return digest or 1
