"""How rank 0 of a replica tells the others what to do at each step: one small message over the hosts' network."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from common.decoding import Command
from common.errors import LOST_PEER, EngineError, first_line

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LENGTH_BYTES = 8
_SMALL_BYTES = 512  # of the first message, which most steps get by with


class ReplicaRelay:
    """common.decoding.Relay over a gloo group of the replica's ranks, the first of which is its rank 0."""

    def __init__(self, group: ProcessGroup, rank: int, *, is_first: bool) -> None:
        import torch

        self._group = group
        self._rank = rank
        self._is_first = is_first
        self._small = torch.zeros(_SMALL_BYTES, dtype=torch.uint8)
        self._bytes = self._small.numpy().data

    def exchange(self, command: Command, step: int) -> Command:
        """Return rank 0's command on every rank. Trusts it: all ranks are one run's. Raises EngineError if one is
        gone."""
        try:
            return self._exchange(command)
        except RuntimeError as error:
            raise EngineError(f"rank {self._rank}, step {step}: {LOST_PEER} ({first_line(error)})") from error

    def gather(self, said: str | None) -> list[str | None]:
        import torch.distributed as dist

        found: list[str | None] = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(found, said, group=self._group)
        except RuntimeError as error:
            raise EngineError(f"rank {self._rank}: {LOST_PEER} ({first_line(error)})") from error
        return found

    def _exchange(self, command: Command) -> Command:
        import torch
        import torch.distributed as dist

        message, room = b"", _SMALL_BYTES - _LENGTH_BYTES
        if self._is_first:
            message = pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL)
            self._bytes[:_LENGTH_BYTES] = len(message).to_bytes(_LENGTH_BYTES, "little")
            if len(message) <= room:
                self._bytes[_LENGTH_BYTES : _LENGTH_BYTES + len(message)] = message
        dist.broadcast(self._small, group=self._group, group_src=0)
        length = int.from_bytes(self._bytes[:_LENGTH_BYTES], "little")
        if length > room:
            large = torch.frombuffer(bytearray(message or length), dtype=torch.uint8)
            dist.broadcast(large, group=self._group, group_src=0)
            message = bytes(large.numpy())
        elif not self._is_first:
            message = bytes(self._bytes[_LENGTH_BYTES : _LENGTH_BYTES + length])
        if self._is_first:
            return command
        received: Command = pickle.loads(message)
        return received
