"""The engines' weights, memory and pauses: all replicas change alike."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from uuid import uuid4

from common.decoding import DropWeights, Order, PutWeights, ReadWeights
from common.serving.http.engines.client import EngineClient
from common.serving.http.errors import ApiError
from common.serving.messages import Continue, Obeyed, Pause

_ENDED = "a replica has ended meanwhile: send it again once GET /ready lists all of them as ready"


class Rollouts:
    """What is asked of all replicas over `client`."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._replacing = asyncio.Lock()

    async def ask(self, what: Order | Pause | Continue) -> None:
        """Have all replicas do something. Raises ApiError where one cannot."""
        _check((await self._client.ask(what, uuid4().hex)).values())

    async def replace(self, folder: str, version: str | None, *, is_aborting: bool) -> str:
        """Replace the weights of all replicas by a folder's, once what is being decoded has ended or was aborted.
        Return their version. Raises ApiError, with the old weights in force everywhere, where one cannot; at once,
        with nothing aborted, where there is no such folder."""
        if not await asyncio.to_thread(os.path.isdir, folder):
            raise ApiError(400, f"model_path: {folder}: no such folder on the server's machine", "model_path")
        async with self._replacing:
            # A client that goes must not leave replicas with weights that were read and are not put in force.
            return await asyncio.shield(self._replace(folder, version, is_aborting=is_aborting))

    async def _replace(self, folder: str, version: str | None, *, is_aborting: bool) -> str:
        key = uuid4().hex
        found = await self._client.ask(ReadWeights(folder), key, is_aborting=is_aborting)
        problem = next((one for one in found.values() if one is None or one.problem is not None), None)
        have_read = [number for number, one in found.items() if one is not None and one.problem is None]
        if len(have_read) < len(found):
            await self._client.ask(DropWeights(), key, to=have_read)
            if problem is None:
                raise ApiError(503, _ENDED)
            raise ApiError(problem.status, problem.problem or "", "model_path")
        put = [
            one for one in (await self._client.ask(PutWeights(version), key, to=have_read)).values() if one is not None
        ]
        if not put:
            raise ApiError(503, _ENDED)
        _check(put)
        return put[0].weight_version


def _check(told: Iterable[Obeyed | None]) -> None:
    """Raise ApiError where a replica could not do what was asked of it."""
    for obeyed in told:
        if obeyed is None:
            raise ApiError(503, _ENDED)
        if obeyed.problem is not None:
            raise ApiError(obeyed.status, obeyed.problem)
